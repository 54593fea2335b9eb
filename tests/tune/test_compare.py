"""Only a gain that is no accident counts."""

from __future__ import annotations

import pytest

from cpuchat.telemetry.answer import DecodeRate, compare


def rates(*rounds: float) -> DecodeRate:
    ordered = sorted(rounds)
    return DecodeRate(tok_s=ordered[len(ordered) // 2], spread=ordered[-1] - ordered[0], rounds=rounds)


def test_a_clear_gain_is_kept() -> None:
    judged = compare(rates(40.0, 40.2, 40.1), rates(43.0, 43.1, 43.2))
    assert judged.keep
    assert judged.gain == pytest.approx(43.1 / 40.1 - 1)
    assert judged.needed == 0.02
    assert judged.words == "Keep it: 40.1 → 43.1 tok/s, +7.5 %, significant (threshold 2.0 %)."


def test_two_percent_are_not_enough() -> None:
    assert not compare(rates(50.0), rates(50.9)).keep
    assert not compare(rates(50.0), rates(51.0)).keep
    assert compare(rates(50.0), rates(51.1)).keep


@pytest.mark.parametrize("noisy_first", [True, False])
def test_twice_the_larger_spread_must_be_exceeded(noisy_first: bool) -> None:
    quiet, noisy = (50.0, 50.0, 50.0), (48.0, 50.0, 51.0)  # a spread of 3: 6 tok/s are needed
    before = rates(*(noisy if noisy_first else quiet))

    def after(gain: float) -> DecodeRate:
        return rates(*(rate + gain for rate in (quiet if noisy_first else noisy)))

    assert compare(before, after(5.9)).keep is False
    assert "not significant (threshold 12.0 %)" in compare(before, after(5.9)).words
    assert compare(before, after(6.1)).keep is True


def test_a_loss_is_reverted_and_called_one() -> None:
    judged = compare(rates(50.0), rates(45.0))
    assert not judged.keep
    assert judged.words == "Revert it: 50.0 → 45.0 tok/s, −10.0 %, significantly slower."


def test_nothing_gained_is_reverted_without_a_sign() -> None:
    assert "50.0 → 50.0 tok/s, 0.0 %, not significant" in compare(rates(50.0), rates(50.0)).words
