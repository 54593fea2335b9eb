"""Tests the sampler against a plain implementation that sorts the whole row."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cpuchat.base.errors import GenerationFailed, UsageError
from cpuchat.engine.decoding.sampling import Sampler, largest
from cpuchat.protocol.messages import Sampling


def distribution(sampler: Sampler, row: np.ndarray) -> dict[int, float]:
    """Return the probability of each token that may be sampled."""
    ids, weights = sampler.candidates(row)
    return dict(
        zip(map(int, ids), (np.array(weights, np.float64) / np.sum(weights, dtype=np.float64)).tolist(), strict=True)
    )


OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def reference(row: np.ndarray, s: Sampling, window: list[int]) -> dict[int, float]:
    """Apply llama.cpp's default chain step by step to (logit, id) pairs; discards examples in which rounding decides a
    cut. Returns probability by id."""
    logits = [float(x) for x in row]
    for token, count in Counter(window[-s.repeat_last_n :] if s.repeat_last_n else []).items():
        x = np.float32(logits[token])
        penalty = np.float32(s.repeat_penalty)
        x = x * penalty if x <= 0 else x / penalty
        logits[token] = float(
            x - (np.float32(count) * np.float32(s.frequency_penalty) + np.float32(s.presence_penalty))
        )
    kept = sorted(((x, -i) for i, x in enumerate(logits)), reverse=True)
    peak = kept[0][0]
    if s.top_k:
        kept = kept[: s.top_k]
    if s.top_p < 1:
        total = math.fsum(math.exp(x - peak) for x, _ in kept)
        running, size = 0.0, len(kept)
        for i, (x, _) in enumerate(kept):
            running += math.exp(x - peak) / total
            assume(abs(running - s.top_p) > 1e-5)
            if running >= s.top_p:
                size = i + 1
                break
        kept = kept[:size]
    if s.min_p > 0:
        floor = peak + math.log(s.min_p)
        assume(all(abs(x - floor) > 1e-4 for x, _ in kept))
        kept = [pair for i, pair in enumerate(kept) if i == 0 or pair[0] >= floor]
    weights = [math.exp((x - peak) / s.temperature) for x, _ in kept]
    total = math.fsum(weights)
    return {-i: w / total for (_, i), w in zip(kept, weights, strict=True)}


@st.composite
def rows(draw) -> np.ndarray:
    size = draw(st.sampled_from([1, 2, 7, 64, 500, 1500, 5003]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    row = rng.standard_normal(size) * draw(st.sampled_from([0.0, 0.3, 3.0, 30.0]))
    if draw(st.booleans()):
        row = np.round(row)  # many equal logits
    if draw(st.booleans()):
        row[rng.random(size) < 0.5] = -np.inf
        row[int(rng.integers(size))] = 1.0
    return row.astype(np.float32)


samplings = st.builds(
    Sampling, temperature=st.sampled_from([0.2, 0.7, 1.0, 3.0]), top_k=st.sampled_from([0, 0, 1, 2, 40, 300, 10_000]),
    top_p=st.sampled_from([0.0, 0.3, 0.95, 0.9999, 1.0, 1.0]), min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.8]), repeat_last_n=st.sampled_from([0, 3, 64]),
    presence_penalty=st.sampled_from([0.0, 0.6]), frequency_penalty=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 1 << 40),
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(rows(), samplings, st.lists(st.integers(0, 1 << 30), max_size=80))
def test_candidates_and_probabilities_are_those_of_the_whole_row(row, sampling, spoken):
    spoken = [token % row.size for token in spoken]
    expected = reference(row, sampling, spoken)
    sampler = Sampler(sampling, row.size)
    sampler.accept_prompt(spoken)
    before = row.copy()
    got = distribution(sampler, row)
    assert {i for i, p in got.items() if p > 1e-12} == {i for i, p in expected.items() if p > 1e-12}
    assert all(math.isclose(got[i], p, rel_tol=1e-4, abs_tol=1e-9) for i, p in expected.items() if p > 1e-12)
    picked = [sampler.sample(row) for _ in range(5)]
    assert all(expected.get(token, 0) > 0 for token in picked)
    assert np.array_equal(row, before)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1 << 30), samplings)
def test_what_one_row_has_taught_changes_no_other(seed, sampling):
    """The entries near the peak are usually enough; how near follows the rows before."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(sampling, 1500)
    for _ in range(30):
        row = rng.standard_normal(1500) * rng.choice([0.1, 1.0, 3.0, 20.0])
        spikes = int(rng.integers(0, 60))
        row[rng.integers(0, 1500, spikes)] += np.linspace(20, 5, spikes) * rng.choice([0.3, 1.0])
        row = row.astype(np.float32)
        expected, got = reference(row, sampling, []), distribution(sampler, row)
        assert {i for i, p in got.items() if p > 1e-12} == {i for i, p in expected.items() if p > 1e-12}
        assert all(math.isclose(got[i], p, rel_tol=1e-4, abs_tol=1e-9) for i, p in expected.items() if p > 1e-12)


@settings(deadline=None)
@given(rows(), st.integers(1, 2000))
def test_largest_is_exact_and_breaks_ties_by_id(row, k):
    assert largest(row, min(k, row.size)).tolist() == sorted(range(row.size), key=lambda i: (-row[i], i))[:k]


@pytest.mark.parametrize("values", [{}, OFF, {"top_k": 0}], ids=str)
def test_draws_follow_the_distribution(values):
    row = np.array([2.0, 1.0, 0.5, -1.0, -np.inf] + [-3.0] * 300, np.float32)
    sampler = Sampler(Sampling(seed=7, **values), row.size)
    sampler.accept(0)
    n = 3_000
    seen = Counter(sampler.sample(row) for _ in range(n))
    for token, p in distribution(sampler, row).items():
        assert abs(seen[token] - n * p) <= 6 * math.sqrt(n * p * (1 - p)) + 1


def test_the_same_seed_gives_the_same_tokens():
    rng = np.random.default_rng(3)
    table = rng.standard_normal((50, 3000)).astype(np.float32)

    def run(seed: int | None) -> tuple[int, list[int]]:
        sampler = Sampler(Sampling(temperature=1.5, seed=seed, repeat_penalty=1.1), 3000)
        tokens = []
        for row in table:
            tokens.append(sampler.sample(row))
            sampler.accept(tokens[-1])
        return sampler.seed, tokens

    seed, tokens = run(None)
    assert 0 <= seed < 1 << 32
    assert run(seed) == (seed, tokens)
    assert run(seed + 1)[1] != tokens


def test_greedy_takes_the_first_maximum_and_minds_penalties():
    row = np.array([1.0, 5.0, 5.0, 2.0], np.float32)
    assert Sampler(Sampling(temperature=0), 4).sample(row) == 1
    sampler = Sampler(Sampling(temperature=0, repeat_penalty=2.0, repeat_last_n=2), 4)
    picked = []
    for _ in range(5):
        picked.append(sampler.sample(row))
        sampler.accept(picked[-1])
    assert picked == [1, 2, 1, 1, 2]  # punished only while among the last two
    assert row.tolist() == [1.0, 5.0, 5.0, 2.0]


def test_a_row_that_must_not_be_written_is_left_alone():
    row = np.array([1.0, 0.9], np.float32)
    row.flags.writeable = False
    sampler = Sampler(Sampling(temperature=0, presence_penalty=0.5), 2)
    sampler.accept(0)
    assert sampler.sample(row) == 1


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {}, OFF], ids=str)
def test_rows_that_are_no_numbers_are_refused(values):
    for at, bad in ((0, np.nan), (17, np.inf), (999, np.nan)):
        row = np.zeros(1000, np.float32)
        row[at] = bad
        sampler = Sampler(Sampling(**values), 1000)
        sampler.accept(5)
        with pytest.raises(GenerationFailed, match="NaN or infinite"):
            sampler.sample(row)
    with pytest.raises(GenerationFailed):
        Sampler(Sampling(**values), 3).sample(np.full(3, -np.inf, np.float32))


def test_wrong_settings_are_named():
    for name, value in (
        ("temperature", math.nan), ("top_k", -1), ("top_p", math.inf), ("repeat_penalty", 1e-300), ("seed", -5),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=name):
            Sampler(Sampling(**{name: value}), 10)
