"""Tests what a draft model is expected to gain: against the formula's cases, and against simulation."""

from __future__ import annotations

import pytest

from cpuchat.models.drafts.candidates import NOT_CALIBRATED, expectation, gain

FLAT = (10.0,) * 32
"""Checking many tokens costs as much as one: what the formula's authors take for granted."""
PROPORTIONAL = tuple(10.0 * n for n in range(1, 33))
"""Checking n tokens costs n times as much: nothing can be gained."""


def test_the_formula_of_the_paper_where_a_pass_always_costs_the_same() -> None:
    """(1 - a^(g+1)) / ((1 - a) (g c + 1)) with the cost c of a drafted token by that of a pass."""
    acceptance, cost = 0.8, 0.1
    found = gain(FLAT, 10.0 * cost, acceptance)
    by_depth = {g: (1 - acceptance ** (g + 1)) / ((1 - acceptance) * (g * cost + 1)) for g in range(32)}
    assert found.depth == max(by_depth, key=lambda g: by_depth[g])
    assert found.speedup == pytest.approx(by_depth[found.depth])


def test_a_costly_depth_is_left_out_and_a_deeper_bargain_taken() -> None:
    trap = (10.0, 30.0, 30.0, 12.0)
    assert gain(trap, 0.1, 0.9).depth == 3
    assert gain(trap[:3], 0.1, 0.9).depth == 0


def test_what_is_not_known_is_said() -> None:
    unmeasured = expectation((), 1.0, "by its size")
    assert (unmeasured.gains, unmeasured.words) == ((), NOT_CALIBRATED)
    unknown = expectation(FLAT, 0.0, "the read bandwidth is not measured")
    assert (unknown.gains, unknown.words) == ((), "the read bandwidth is not measured")
    assert not unmeasured.pays


def test_typical_texts_and_what_was_measured_with_the_pair() -> None:
    typical = expectation(FLAT, 1.0, "by its size")
    assert [(one.kind, one.acceptance) for one in typical.gains] == [("prose", 0.6), ("code", 0.8)]
    assert typical.pays
    measured = expectation(FLAT, 1.0, "by its size", 0.74)
    assert [(one.kind, one.acceptance) for one in measured.gains] == [("measured", 0.74), ("prose", 0.6), ("code", 0.8)]
    assert "acceptance of 74 %" in measured.words
    assert measured.mean == measured.gains[0].speedup != typical.mean


def test_no_gain_is_said_plainly() -> None:
    bound = expectation(PROPORTIONAL, 1.0, "by its size")
    assert not bound.pays
    assert bound.words.startswith("no gain: batch verification costs")
    slow = expectation(FLAT, 50.0, "by its size")
    assert not slow.pays
    assert slow.words == "no gain: a drafted token takes 50.0 ms, too slow against 10.0 ms for a pass"
    half = expectation((10.0, 15.0, 20.0, 25.0), 1.0, "by its size")
    assert half.words.startswith("no gain in prose, ≈ 1.")
