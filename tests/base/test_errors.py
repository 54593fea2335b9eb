"""Exit codes: scripts tell failures apart by them."""

from __future__ import annotations

import re
from pathlib import Path

import cpuchat

SHARED = {
    3: {"ChatNotFound", "ModelNotFound", "NotOnHub"},
    4: {"ModelDamaged", "ModelUnsupported"},
    8: {"WorkerDied", "WorkerStuck"},
}
"""Codes that mean the same thing to a script, whichever of the two happened."""


def test_no_two_failures_share_an_exit_code_by_accident() -> None:
    by_code: dict[int, set[str]] = {}
    for file in Path(cpuchat.__file__).parent.rglob("*.py"):
        for name, code in re.findall(r"^class (\w+)\([^)]*\bexit_code=(\d+)", file.read_text(), re.MULTILINE):
            by_code.setdefault(int(code), set()).add(name)
    assert len(by_code) > 15 and by_code[14] == {"ProbeFailed"}
    assert {code: names for code, names in by_code.items() if len(names) > 1} == SHARED
