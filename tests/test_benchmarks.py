"""Tests that the benchmarks find what they import from cpuchat, and the tests that they name: nothing else notices when
one moves."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS / "hostile"))

from reports import Report, page, reports  # noqa: E402

LISTS = reports([])


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


@pytest.mark.parametrize("area", LISTS)
def test_the_tests_of_public_reports_exist(area: str) -> None:
    assert [one.test for one in LISTS[area] if not _is_test(one)] == []
    assert {one.before for one in LISTS[area]} <= {"failed", "held"}
    assert {one.verdict for one in LISTS[area]} <= {"right", "refused", "limit"}
    assert [one.source for one in LISTS[area] if one.verdict == "limit" and not one.note] == []


def test_the_page_lists_all_reports() -> None:
    """`benchmarks/hostile/reports.py --write` writes the list."""
    assert page(LISTS).strip() in (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def _is_test(report: Report) -> bool:
    file, _, name = report.test.partition("::")
    if not (ROOT / file).is_file():
        return False
    tree = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    functions = [node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return name.partition("[")[0].rpartition("::")[2] in functions
