"""Tests the page of published claims."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_of_claims_has_what_the_planner_gives_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    claims = importlib.import_module("claims")
    page = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    assert page == claims.page(), "run `python benchmarks/claims.py`"


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ("70B with drafts: 60–75 tok/s", "impossible"),
        ("stock 70B: 7–8 tok/s", "plausible"),
        ("405B Q4: 2.5–3 tok/s", "impossible"),
        ("671B Q8: 6.2 tok/s on one socket with 768 GB", "plausible"),
        ("12 tokens drafted in 60 µs", "impossible"),
        ("70B with drafts: 25–32 tok/s, 5 times stock", "conditional"),
        ("70B with drafts: 28–38 tok/s, 7 times stock", "impossible"),
        ("DeepSeek-R1 8B Q4_K_M: 7.8 tok/s on 2 × EPYC 9334", "conditional"),
        ("Qwen3 30B-A3B runs at the speed of a 3B model on a plain CPU", "plausible"),
        ("A2, 8 OCPU, Q8R16: 9.2 tok/s", "plausible"),
    ],
)
def test_the_best_known_claims_have_their_verdicts(claim: str, verdict: str) -> None:
    lines = (ROOT / "docs/claims.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {claim} |")]
    assert row.split(" | ")[2].startswith(verdict)
