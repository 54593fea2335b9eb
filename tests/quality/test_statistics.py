"""Tests the statistics against values worked out by hand or by a slower way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cpuchat.quality.messages import RowComparer
from cpuchat.quality.statistics import Interval, Scores, indistinguishable, summarize, wilson
from tests.support.cores import ONE_CPU


def scores(kld: list[float], base: list[float], other: list[float], same: list[int]) -> Scores:
    return Scores(*(np.array(values, np.float32) for values in (kld, base, other, same)))


def test_a_summary_is_what_the_formulas_give_by_hand() -> None:
    found = summarize(
        [scores([0.0, 0.1], [1.0, 1.0], [1.0, 1.5], [1, 1]), scores([0.2, 0.3], [2.0, 2.0], [2.0, 3.0], [1, 0])]
    )
    assert found.kld.value == pytest.approx(0.15)
    assert found.kld.error == pytest.approx(0.1)  # sums of the windows: ∓0.2; sqrt(2 / 1 · (0.04 + 0.04)) / 4
    assert found.kld_median == pytest.approx(0.15)
    assert found.ppl_base == pytest.approx(math.exp(1.5)) and found.ppl_other == pytest.approx(math.exp(1.875))
    assert found.ln_ppl_ratio.value == pytest.approx(0.375)
    assert found.ln_ppl_ratio.error == pytest.approx(0.125)  # ∓0.25
    changes = [math.exp(-1.5) - math.exp(-1), math.exp(-3) - math.exp(-2)]
    assert found.rms_dp.value == pytest.approx(math.sqrt(sum(x * x for x in changes) / 4), rel=1e-6)
    assert (found.n, found.same_top.value) == (4, 0.75)


def test_one_window_has_no_error_and_tells_nothing_apart() -> None:
    one = scores([0.0, 0.1], [1.0, 1.0], [1.0, 1.5], [1, 1])
    found = summarize([one])
    assert (found.kld.error, found.rms_dp.error) == (math.inf, math.inf)
    assert found.same_top == Interval(1.0, 0.0, 1.0) and found.kld.interval.low == -math.inf
    assert indistinguishable([one], [scores([9.0, 9.0], [1.0, 1.0], [9.0, 9.0], [0, 0])])


def windows(seed: int, kld: float = 0.05, n: int = 32) -> list[Scores]:
    """Return windows of 128 positions, whose figures go up and down together as those of real texts do."""
    rng, found = np.random.default_rng(seed), list[Scores]()
    for _ in range(n):
        of_text, base = rng.lognormal(0, 0.6), rng.exponential(2, 128)
        one = rng.exponential(kld * of_text, 128)
        same = rng.random(128) < np.exp(-2 * np.sqrt(kld) * of_text)
        found.append(Scores(*(x.astype(np.float32) for x in (one, base, base + rng.normal(0, kld, 128), same))))
    return found


def test_the_interval_has_the_true_mean_as_often_as_it_says() -> None:
    """By windows that are drawn again and again; taken as independent, positions would miss it every third time."""
    true = summarize([window for seed in range(60) for window in windows(1000 + seed)])
    inside = [0, 0]
    for seed in range(400):
        found = summarize(windows(seed))
        inside[0] += found.kld.interval.low <= true.kld.value <= found.kld.interval.high
        inside[1] += found.same_top.low <= true.same_top.value <= found.same_top.high
    assert min(inside) >= 400 * 0.92


def test_equal_files_are_called_different_at_most_one_time_in_twenty() -> None:
    """Each window's figures change sides at random, so that neither file is better."""
    a, b = windows(1), windows(2, kld=0.06)
    rng, different = np.random.default_rng(3), 0
    for _ in range(400):
        chosen = rng.integers(0, len(a), len(a))
        swapped = [(a[i], b[i]) if rng.random() < 0.5 else (b[i], a[i]) for i in chosen]
        different += not indistinguishable([one for one, _ in swapped], [other for _, other in swapped])
    assert different <= 20


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # 81 of 263: Newcombe 1998, Statistics in Medicine 17:857, table I. The others by hand: z²/(n + z²) at the edges.
    [(81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0)],
)
def test_the_interval_of_a_share_is_wilsons(successes: int, n: int, low: float, high: float) -> None:
    found = wilson(successes / n, n)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.fixture
def comparer():
    made = RowComparer(ONE_CPU * 2, 1000)
    yield made
    made.close()


def test_rows_are_compared_as_softmax_in_double_precision_says(comparer: RowComparer) -> None:
    rng = np.random.default_rng(1)
    p = (4 * rng.standard_normal((33, 1000)) + 20).astype(np.float32)
    q = (p + 0.1 * rng.standard_normal((33, 1000)) - 7).astype(np.float32)
    tokens = rng.integers(0, 1000, 33).tolist()
    found, tops = comparer.compare(list(p), list(q), tokens)
    log_p, log_q = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), axis=1)[:, None] for x in (p, q))
    rows = np.arange(33)
    np.testing.assert_allclose(found.kld, (np.exp(log_p) * (log_p - log_q)).sum(1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.base_nll, -log_p[rows, tokens], atol=1e-5)
    np.testing.assert_allclose(found.other_nll, -log_q[rows, tokens], atol=1e-5)
    assert found.same_top.tolist() == (p.argmax(1) == q.argmax(1)).tolist()
    assert tops.base.tolist() == p.argmax(1).tolist() and tops.other.tolist() == q.argmax(1).tolist()
    np.testing.assert_allclose(tops.base_p, np.exp(log_p.max(1)), rtol=1e-5)
