"""Tests the page of published claims."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
TABLE = [line for line in PAGE.partition("## Claims")[2].splitlines() if line.startswith("| ")]
ROWS = [line.strip("| ").split(" | ") for line in TABLE[1:]]


def test_the_page_has_the_figures_of_the_planner_and_of_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert importlib.import_module("renew_claims").renew(PAGE) == PAGE, "run `python benchmarks/renew_claims.py`"


def test_each_claim_has_a_verdict_and_a_reason() -> None:
    assert len(ROWS) >= 40
    for row in ROWS:
        assert len(row) == 6, row
        verdict, _, condition = row[4].partition(": ")
        assert verdict in {"true", "conditional", "false"}, row
        assert bool(condition) == (verdict == "conditional"), row
        assert row[5], row
