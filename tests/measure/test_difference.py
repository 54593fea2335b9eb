"""Tests when a difference is believed, on made-up rates."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests
from cpuchat.compare.figures import asked_after
from cpuchat.measure.difference import MATTERS, WRONG, Verdict, compare, of_answer, rounds_for
from cpuchat.measure.turns import in_order

TRACES: dict[str, list[tuple[float, float]]] = json.loads(
    (Path(tests.__file__).parents[1] / "benchmarks" / "noise.json").read_text()
)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([20.0], [30.0], "faster"),
        ([20.0], [21.0], "noisy"),  # of one round
        ([20.0, 20.1, 19.9], [22.0, 22.1, 21.9], "faster"),
        ([20.0, 20.1, 19.9], [18.0, 18.1, 17.9], "slower"),
        ([20.0, 25.0, 30.0], [22.0, 27.0, 24.0], "noisy"),
        ([20.0] * 9, [20.2] * 9, "same"),
        ([20.0] * 5, [20.0 * (1 + 0.75 * MATTERS)] * 5, "noisy"),
        ([10.0, 20.0, 40.0], [15.0, 30.0, 60.0], "faster"),  # pairs: both drift alike
        ([20.0, 20.0, 20.0, 20.0], [22.0, 22.0, 22.0], "faster"),  # in turn
    ],
)
def test_a_difference_is_believed_that_is_beyond_the_noise_and_matters(
    a: list[float], b: list[float], verdict: Verdict
) -> None:
    found = compare(a, b)
    low, high = found.interval
    assert found.verdict == verdict and low < found.ratio < high
    assert verdict not in ("faster", "slower") or not low <= 1 <= high
    if len(a) == len(b):
        assert compare(b, a).ratio == pytest.approx(1 / found.ratio)


@pytest.mark.parametrize("scatter", [0.01, 0.02])
def test_so_many_measurements_show_a_gain(scatter: float) -> None:
    n, dice, found = rounds_for(0.05, scatter, 15, 30), random.Random(1), 0
    assert n is not None and rounds_for(0.1, scatter, 15, 30) < n and rounds_for(0.05, scatter, 15, n - 1) is None  # type: ignore[operator]
    for _ in range(200):
        a, b = ([rate * math.exp(dice.gauss(0, scatter)) for _ in range(n)] for rate in (20.0, 21.0))
        found += compare(a, b, asked=15, apart=True).verdict == "faster"
    assert found / 200 > 0.88


def test_one_answer_tells_what_is_beyond_the_noise_of_its_passes() -> None:
    assert [of_answer(ratio).verdict for ratio in (1.24, 1.05, 0.97, 0.8)] == ["faster", "noisy", "noisy", "slower"]


def test_what_holds_for_a_whole_round_is_no_noise_of_a_pair() -> None:
    steady, jumping = (([20.0 * n, 20.5 * n, 19.5], [22.0 * n, 22.3 * n, 21.6]) for n in (1.0, 1.5))
    assert compare(*jumping).verdict == compare(*steady).verdict == "faster"


def test_a_steady_drift_is_no_gain() -> None:
    anchors, rivals = [20 * 0.97**n for n in (0, 2, 4, 6)], [20 * 0.97**n for n in (1, 3, 5)]
    assert compare(anchors, rivals).gain == pytest.approx(0)


def test_more_questions_and_other_times_need_more() -> None:
    rates = [20.0, 21.0, 22.0], [22.0, 23.0, 24.0]
    assert compare(*rates).needed < compare(*rates, asked=12).needed
    assert compare(*rates).needed < compare(*rates, apart=True).needed


def traced(name: str, seed: int, drift: float) -> Iterator[tuple[float, bool]]:
    """Yield the rates of a real trace from somewhere on, and whether other programs ran."""
    start = random.Random(seed).randrange(len(TRACES[name]))
    for n in itertools.count():
        rate, cpu_wait = TRACES[name][(start + n) % len(TRACES[name])]
        yield rate * (1 - drift * n / 100), cpu_wait > 0.05


@pytest.mark.parametrize(("noise", "drift"), [(0.01, 0.0), (0.03, 0.0), (0.02, 0.1), ("steady", 0.0), ("phases", 0.0)])
def test_equal_sides_are_hardly_ever_called_faster_or_slower(noise: float | str, drift: float) -> None:
    """Comparisons of up to five rounds, looked at after each."""
    wrong, runs = 0, 500
    for seed in range(runs):
        dice = random.Random(seed)
        if isinstance(noise, str):
            rates = traced(noise, seed, drift)
        else:
            rates = ((math.exp(dice.gauss(0, noise)) * (1 - drift * n / 100), False) for n in itertools.count())
        sides: tuple[list[float], list[float]] = ([], [])
        told: set[Verdict] = set()
        for number in range(5):
            measured = {side: next(rates) for side in in_order((0, 1), number)}
            if not any(disturbed for _, disturbed in measured.values()):
                for side in (0, 1):
                    sides[side].append(measured[side][0])
                told.add(compare(*sides, asked=asked_after(len(sides[0]))).verdict)
        wrong += bool(told & {"faster", "slower"})
    assert wrong <= WRONG * runs
