"""Exit codes: scripts tell failures apart by them."""

from __future__ import annotations

import json
import subprocess
import sys

SHARED = {3: {"ChatNotFound", "ModelNotFound", "NotOnHub"}, 4: {"ModelDamaged", "ModelUnsupported"}}
"""Codes that mean the same thing to a script, whichever of the two happened."""

# In a process of its own: importing every module would change what other tests start from.
LIST_ALL = """
import importlib, json, pkgutil
import cpuchat
from cpuchat.errors import CpuchatError

for module in pkgutil.walk_packages(cpuchat.__path__, "cpuchat."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

def below(kind):
    yield kind
    for child in kind.__subclasses__():
        yield from below(child)

own = {(kind.__name__, kind.exit_code) for kind in below(CpuchatError) if "exit_code" in vars(kind)}
print(json.dumps(sorted(own)))
"""


def test_no_two_failures_share_an_exit_code_by_accident() -> None:
    listed = subprocess.run([sys.executable, "-c", LIST_ALL], capture_output=True, text=True, check=True).stdout
    by_code: dict[int, set[str]] = {}
    for name, code in json.loads(listed):
        by_code.setdefault(code, set()).add(name)
    assert len(by_code) > 15
    assert {code: names for code, names in by_code.items() if len(names) > 1} == SHARED
