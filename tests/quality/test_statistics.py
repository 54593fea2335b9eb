"""Tests the statistics against values worked out by hand or by a slower way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cpuchat.quality.messages import RowComparer
from cpuchat.quality.statistics import Interval, Scores, indistinguishable, summarize, wilson


def scores(kld: list[float], base: list[float], other: list[float], same: list[int]) -> Scores:
    return Scores(*(np.array(values, np.float32) for values in (kld, base, other, same)))


def test_a_summary_is_what_the_formulas_give_by_hand() -> None:
    found = summarize(scores([0.0, 0.1, 0.2, 0.3], [1.0, 1.0, 2.0, 2.0], [1.0, 1.5, 2.0, 3.0], [1, 1, 1, 0]))
    assert found.kld.value == pytest.approx(0.15)
    assert found.kld.error == pytest.approx(0.0645497, rel=1e-5)  # sqrt(((.15² + .05²) · 2 / 3) / 4)
    assert found.kld_median == pytest.approx(0.15)
    assert found.ppl_base == pytest.approx(math.exp(1.5)) and found.ppl_other == pytest.approx(math.exp(1.875))
    assert found.ln_ppl_ratio.value == pytest.approx(0.375)
    assert found.ln_ppl_ratio.error == pytest.approx(0.2393568, rel=1e-5)
    changes = [math.exp(-1.5) - math.exp(-1), math.exp(-3) - math.exp(-2)]
    assert found.rms_dp.value == pytest.approx(math.sqrt(sum(x * x for x in changes) / 4), rel=1e-6)
    assert (found.n, found.same_top.value) == (4, 0.75)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # 81 of 263: Newcombe 1998, Statistics in Medicine 17:857, table I. The others by hand: z²/(n + z²) at the edges.
    [(81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0)],
)
def test_the_interval_of_a_share_is_wilsons(successes: int, n: int, low: float, high: float) -> None:
    found = wilson(successes, n)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_intervals_that_touch_overlap() -> None:
    assert Interval(1, 0, 2).overlaps(Interval(3, 2, 4))
    assert not Interval(1, 0, 2).overlaps(Interval(3, 2.1, 4))


def test_files_are_ranked_only_where_the_text_tells_them_apart() -> None:
    rng = np.random.default_rng(0)

    def file(kld: float, same: float) -> Scores:
        n = 2000
        base = rng.exponential(2, n)
        return Scores(
            rng.exponential(kld, n).astype(np.float32),
            base.astype(np.float32),
            (base + rng.normal(0, kld, n)).astype(np.float32),
            (rng.random(n) < same).astype(np.float32),
        )

    close, closer, far = (summarize(file(*of)) for of in ((0.010, 0.970), (0.010, 0.971), (0.2, 0.8)))
    assert indistinguishable(close, closer)
    assert not indistinguishable(close, far)


@pytest.fixture
def comparer():
    made = RowComparer(2, 1000)
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


def test_a_row_against_itself_is_no_loss_at_all(comparer: RowComparer) -> None:
    row = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    found, _ = comparer.compare([row], [row.copy()], [5])
    assert found.kld[0] == pytest.approx(0, abs=1e-7) and found.same_top[0] == 1


def test_logits_that_differ_by_a_constant_are_the_same_distribution(comparer: RowComparer) -> None:
    row = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    found, _ = comparer.compare([row], [row + 100], [5])
    assert found.kld[0] == pytest.approx(0, abs=1e-5)
