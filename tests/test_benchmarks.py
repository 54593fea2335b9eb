"""Tests that the benchmarks find what they import from cpuchat, and the tests that they name, and that what names a
benchmark finds it: nothing else notices when one moves."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
WORK = BENCHMARKS / "work"
sys.path.append(str(BENCHMARKS / "hostile"))

from reports import Report, page, reports  # noqa: E402

LISTS = reports([])
PATH = re.compile(r"\bbenchmarks/((?!work/)[\w/-]+\.(?:py|toml|json|md))(?:#([\w-]+))?")
IN_CODE = re.compile(r"`((?:hostile/)?\w+\.(?:py|cpp))`")
LINK = re.compile(r"\]\((?!\w+:)([\w/.-]*)(?:#([\w-]+))?\)")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]


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


def test_benchmarks_that_are_named_exist() -> None:
    places = [*PAGES, *BENCHMARKS.rglob("*.toml")]
    for folder in ("cpuchat", "tests", "screenshots", "benchmarks"):
        places += (ROOT / folder).rglob("*.py")
    named = {(place, *found) for place in places if WORK not in place.parents for found in PATH.findall(_text(place))}
    assert {place.name for place, _, _ in named} > {"machine.md", "constants.py", "simulator.py"}
    missing = [f"{place}: {file}" for place, file, _ in named if not (BENCHMARKS / file).is_file()]
    missing += [f"{place}: #{name}" for place, file, name in named if name and name not in _anchors(BENCHMARKS / file)]
    assert missing == []


def test_the_list_of_benchmarks_names_every_script_and_finds_what_each_guards() -> None:
    page = BENCHMARKS / "README.md"
    files = (*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("hostile/*.py"))
    scripts = {file.relative_to(BENCHMARKS).as_posix() for file in files if '"__main__"' in _text(file)}
    own, _, gone = _text(page).partition("## Cited figures whose scripts are in git's history")
    assert gone and [file for file in IN_CODE.findall(own) if not (BENCHMARKS / file).is_file()] == []
    rows = re.findall(r"^\| `([\w/]+\.py)`", _text(page).partition("## What is compared")[0], re.MULTILINE)
    assert sorted(rows) == sorted(scripts - {"paced_worker.py"})  # the process that ui.py starts


@pytest.mark.parametrize("page", [*PAGES, BENCHMARKS / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(_text(page)):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), f"{target}#{anchor}"


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _anchors(page: Path) -> set[str]:
    """Return the names by which GitHub links to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("area", LISTS)
def test_the_tests_of_public_reports_exist(area: str) -> None:
    assert [one.test for one in LISTS[area] if not _is_test(one)] == []
    assert {one.before for one in LISTS[area]} <= {"failed", "held"}
    assert {one.verdict for one in LISTS[area]} <= {"right", "refused", "limit"}
    assert [one.source for one in LISTS[area] if one.verdict == "limit" and not one.note] == []


def test_the_page_lists_all_reports() -> None:
    """`benchmarks/hostile/reports.py --write` writes the list."""
    assert page(LISTS) == (ROOT / "benchmarks" / "reports.md").read_text(encoding="utf-8")


def _is_test(report: Report) -> bool:
    file, _, name = report.test.partition("::")
    if not (ROOT / file).is_file():
        return False
    tree = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    functions = [node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return name.partition("[")[0].rpartition("::")[2] in functions
