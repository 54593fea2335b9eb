"""Figures follow from events and from times that callers give: nothing else is read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cpuchat.telemetry

MODULES = sorted(Path(cpuchat.telemetry.__file__).parent.glob("*.py"))
ALLOWED = {
    "__future__", "collections", "dataclasses", "datetime", "itertools", "math", "msgspec", "statistics", "typing",
    "cpuchat.costs.model", "cpuchat.protocol", "cpuchat.telemetry",
}  # fmt: skip
IMPURE = {"open", "input", "print", "exec", "eval", "__import__", "now", "today", "utcnow", "import_module"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_no_module_reads_a_file_a_clock_or_a_store(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert all(any(f"{name}.".startswith(f"{one}.") for one in ALLOWED) for name in names), names
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert called not in IMPURE, called
