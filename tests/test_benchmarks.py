"""Tests that the benchmarks find what they import from cpuchat: nothing else notices when it moves."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_what_benchmarks_import_exists() -> None:
    missing: list[str] = []
    for file in (*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("hostile/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "cpuchat":
                missing += [f"{file.name}: {node.module}.{name.name}" for name in node.names if not _exists(node, name)]
    assert missing == []


def _exists(node: ast.ImportFrom, name: ast.alias) -> bool:
    try:
        if hasattr(importlib.import_module(node.module or ""), name.name):
            return True
        importlib.import_module(f"{node.module}.{name.name}")
    except ImportError:
        return False
    return True
