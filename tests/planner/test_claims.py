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


@pytest.mark.parametrize(
    ("document", "claim", "verdict"),
    [
        ("Sovereign 9754", "70B with drafts: 60–75 tok/s, 9 times stock", "false"),
        ("Sovereign 9754", "stock 70B: 7–8 tok/s", "true"),
        ("Sovereign 9754", "405B Q4: 2.5–3 tok/s", "false"),
        ("Sovereign 9754", "671B Q8: 6.2 tok/s on one socket with 768 GB", "true"),
        ("Sovereign 9754", "12 tokens drafted in 60 µs", "false"),
        ("Sovereign 9354", "70B with drafts: 25–32 tok/s, 5 times stock", "conditional"),
        ("Sovereign 2 × 7543", "70B with drafts: 28–38 tok/s, 7 times stock", "false"),
        ("Leaseweb", "DeepSeek-R1 8B Q4_K_M: 7.8 tok/s on 2 × EPYC 9334", "conditional"),
        ("HN", "Qwen3 30B-A3B runs at the speed of a 3B model on a plain CPU", "true"),
        ("9655", "prompt lookup: 12.7 times in summaries (80B, 95.18 tok/s)", "false"),
        ("Ampere", "A2, 8 OCPU, Q8R16: 9.2 tok/s, prefill 158", "true"),
    ],
)
def test_the_best_known_claims_have_their_verdicts(document: str, claim: str, verdict: str) -> None:
    (row,) = [row for row in ROWS if row[:2] == [document, claim]]
    assert row[4].partition(":")[0] == verdict
