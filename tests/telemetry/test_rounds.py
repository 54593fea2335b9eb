"""Tests when a difference in turn is believed, on made-up rates."""

from __future__ import annotations

import random

import pytest

from cpuchat.telemetry.rounds import MAX_ROUNDS, MIN_ROUNDS, InTurn
from cpuchat.tune.halving import Halving, Speed


def in_turn(ratio: float, noise: float = 0.0, seed: int = 0) -> InTurn:
    """Return the rounds of something so many times as fast, until they decide."""
    dice = random.Random(seed)

    def rate(speed: float) -> dict[str, float]:
        return {"decode": speed * (1 + dice.gauss(0, noise))}

    rounds = InTurn(rate(20))
    while not rounds.rounds or not rounds.is_decided(["decode"]):
        rounds.add(rate(20 * ratio), rate(20))
    return rounds


def test_a_clear_gain_takes_few_rounds_and_one_near_the_threshold_more() -> None:
    clear = in_turn(1.3, 0.01)
    assert clear.rounds == MIN_ROUNDS and clear.gain("decode").is_sure
    assert clear.gain("decode").gain == pytest.approx(0.3, abs=0.02)
    assert any(in_turn(1.04, 0.02, seed).rounds > MIN_ROUNDS for seed in range(10))
    assert all(in_turn(1.04, 0.02, seed).rounds <= MAX_ROUNDS for seed in range(10))


def test_no_gain_is_told_early() -> None:
    rounds = in_turn(0.9, 0.01)
    assert rounds.rounds < MIN_ROUNDS and not rounds.gain("decode").is_sure
    assert in_turn(1.0).rounds == 1 and in_turn(1.01).rounds == 1


def test_a_gain_of_less_than_two_percent_is_never_sure() -> None:
    assert not in_turn(1.019).gain("decode").is_sure
    assert in_turn(1.03).gain("decode").is_sure


def test_a_steady_drift_is_no_gain() -> None:
    rounds = InTurn({"decode": 20.0})
    for number in range(1, 4):
        rounds.add({"decode": 20 * 0.97 ** (2 * number - 1)}, {"decode": 20 * 0.97 ** (2 * number)})
    assert rounds.gain("decode").gain == pytest.approx(0)


async def test_equal_settings_are_hardly_ever_called_faster() -> None:
    """Six choices a run: at 1 to 3 % noise at most 2 % of the runs may be wrong, so 0.34 % of the choices."""
    wrong = 0
    for seed in range(600):
        dice = random.Random(seed)

        async def measure(candidate: int, rung: int, dice: random.Random = dice) -> Speed:
            prefill, decode = (1 + dice.gauss(0, 0.02) for _ in range(2))
            return Speed(prefill=100 * prefill, decode=(20 * decode,))

        wrong += (await Halving(measure, 0.5).run(0, [1, 2, 3])).verdict == "faster"
    assert wrong <= 4
