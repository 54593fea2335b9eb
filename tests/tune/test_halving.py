"""Tests the search on made-up machines: known speeds, drift and noise; deterministic."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.tune.halving import HOPELESS, Halving, HalvingResult, Speed

Weather = Callable[[int], float]
BASE = Speed(prefill=100.0, decode=(20.0,))


def calm(_: int) -> float:
    return 1.0


class MadeUp:
    """A machine on which `now` runs at BASE, and others by the given factors of (prefill, decode).

    `weather` slows the n-th measurement down by its factor.
    """

    def __init__(self, weather: Weather = calm, **factors: tuple[float, ...]) -> None:
        self.factors = {"now": (1.0, 1.0), **factors}
        self.weather = weather
        self.measured: list[tuple[str, int]] = []

    async def __call__(self, name: str, rung: int) -> Speed:
        factor = self.weather(len(self.measured))
        self.measured.append((name, rung))
        prefill, *decode = self.factors[name]
        return Speed(prefill=100 * prefill * factor, decode=tuple(20 * one * factor for one in decode))

    async def find(self, prompt_share: float = 0.5) -> HalvingResult[str]:
        others = [name for name in self.factors if name != "now"]
        return await Halving(self, prompt_share).run("now", others)


async def test_the_fastest_wins_with_its_gains() -> None:
    found = await MadeUp(a=(1.0, 0.9), b=(1.2, 1.1), c=(1.05, 1.0), d=(0.5, 0.6)).find()
    assert (found.verdict, found.best) == ("faster", "b")
    assert found.ratio is not None
    assert (found.ratio.decode, found.ratio.prefill) == pytest.approx((1.1, 1.2))
    assert found.spread == pytest.approx(0)
    assert found.anchor == BASE


async def test_the_better_half_is_measured_longer_and_the_hopeless_once() -> None:
    factors = {f"s{n}": (0.5, 0.5) for n in range(4)} | {f"f{n}": (1.1 + n / 100, 1.1 + n / 100) for n in range(4)}
    machine = MadeUp(calm, **factors)
    assert (await machine.find()).best == "f3"
    counts = Counter(name for name, _ in machine.measured)
    assert all(counts[f"s{n}"] == 1 for n in range(4))
    assert counts["f3"] > counts["f2"] >= counts["f1"]
    assert max(rung for name, rung in machine.measured if name == "f3") > 1


async def test_nothing_is_faster() -> None:
    found = await MadeUp(a=(1.0, 0.99), b=(0.99, 1.0)).find()
    assert found.verdict == "no gain"
    found = await MadeUp(a=(0.8, 0.8)).find()
    assert (found.verdict, found.best) == ("slower", "a")
    assert found.ratio is not None
    assert found.ratio.overall < HOPELESS


async def test_a_gain_in_prefill_alone_is_taken_though_it_weighs_little() -> None:
    assert (await MadeUp(a=(1.2, 1.0)).find(0.05)).verdict == "faster"
    assert (await MadeUp(a=(1.2, 0.99)).find(0.05)).verdict in ("no gain", "slower")


async def test_what_loses_somewhere_is_not_taken() -> None:
    assert (await MadeUp(a=(2.0, 0.93)).find(0.9)).verdict == "mixed"
    assert (await MadeUp(a=(0.9, 1.3)).find(0.1)).verdict == "mixed"
    one_text = MadeUp(a=(1.0, 1.6, 0.9))
    one_text.factors["now"] = (1.0, 1.0, 1.0)
    assert (await one_text.find()).verdict == "mixed"


async def test_a_steady_drift_changes_nothing() -> None:
    def cooling(n: int) -> float:
        return 0.985**n

    found = await MadeUp(cooling, a=(1.0, 1.0), b=(1.1, 1.1), c=(0.9, 0.9)).find()
    assert (found.verdict, found.best) == ("faster", "b")
    assert found.ratio is not None
    assert found.ratio.overall == pytest.approx(1.1, rel=0.01)
    assert (await MadeUp(cooling, a=(1.0, 1.0)).find()).verdict == "no gain"


async def test_what_was_disturbed_once_is_measured_again() -> None:
    def gust(n: int) -> float:
        return 0.5 if n == 0 else 1.0  # the first measurement of the anchor

    machine = MadeUp(gust, a=(1.2, 1.2))
    assert (await machine.find()).verdict == "faster"
    assert [name for name, _ in machine.measured][:5] == ["now", "a", "now", "a", "now"]


async def test_a_busy_machine_is_told_and_nothing_is_taken() -> None:
    def storm(n: int) -> float:
        return (1.0, 0.6, 0.8)[n % 3]

    found = await MadeUp(storm, a=(1.3, 1.3)).find()
    assert found.verdict == "busy"
    assert found.problem.endswith("%")


async def test_noise_of_three_percent_adopts_nothing_that_is_not_faster_and_does_not_hide_a_gain_of_fifteen() -> None:
    for seed in range(20):
        dice = random.Random(seed)
        found = await MadeUp(lambda _, dice=dice: 1 - 0.03 * dice.random(), a=(1, 1), b=(1, 1), c=(0.99, 0.99)).find()
        assert found.verdict in ("no gain", "slower", "busy"), seed
        dice = random.Random(seed)
        noisy = MadeUp(lambda _, dice=dice: 1 - 0.03 * dice.random(), a=(1, 1), b=(1.15, 1.15), c=(0.9, 0.9))
        found = await noisy.find()
        assert (found.verdict, found.best) == ("faster", "b"), seed


async def test_what_cannot_be_used_is_left_out() -> None:
    machine = MadeUp(a=(1.2, 1.2))

    async def measure(name: str, rung: int) -> Speed:
        if name == "broken":
            raise UsageError("It does not fit.")
        return await machine(name, rung)

    found = await Halving(measure, 0.5).run("now", ["broken", "a"])
    assert (found.verdict, found.best) == ("faster", "a")
    found = await Halving(measure, 0.5).run("now", ["broken"])
    assert (found.verdict, found.best, found.problem) == ("failed", None, "It does not fit.")
