"""Tests the search on made-up machines: known speeds, drift and noise; deterministic."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from cpuchat.measure.difference import WRONG
from cpuchat.tune.measurer import Speed
from cpuchat.tune.tuner import SearchResult, search

Weather = Callable[[int], float]


def calm(_: int) -> float:
    return 1.0


class MadeUp:
    """A machine on which `now` runs at 100 and 20 tok/s, and others by the given factors of (prefill, decode); what has
    none cannot be measured. `weather` slows the n-th measurement down by its factor."""

    def __init__(self, weather: Weather = calm, **factors: tuple[float, ...]) -> None:
        self.factors = {"now": (1.0, 1.0), **factors}
        self.weather = weather
        self.measured: list[str] = []

    async def __call__(self, name: str) -> dict[str, float] | None:
        factor = self.weather(len(self.measured))
        self.measured.append(name)
        if not self.factors[name]:
            return None
        prefill, *decode = self.factors[name]
        return Speed(prefill=100 * prefill * factor, decode=tuple(20 * one * factor for one in decode)).rates()

    async def find(self) -> SearchResult[str]:
        return await search(self, "now", [name for name in self.factors if name != "now"])


def gain(found: SearchResult[str], name: str) -> float:
    return found.differences[name].gain


async def test_the_fastest_wins_with_its_gains() -> None:
    found = await MadeUp(a=(1.0, 0.9), b=(1.2, 1.1), c=(1.05, 1.0), d=(0.5, 0.6)).find()
    assert (found.verdict, found.best) == ("faster", "b")
    assert (gain(found, "decode"), gain(found, "prefill")) == pytest.approx((0.1, 0.2))
    assert (found.anchor["prefill"], found.anchor["decode"]) == pytest.approx((100, 20))


async def test_what_may_be_faster_is_measured_twice_and_the_hopeless_once() -> None:
    factors = {f"s{n}": (0.5, 0.5) for n in range(4)} | {f"f{n}": (1.1 + n / 100, 1.1 + n / 100) for n in range(4)}
    machine = MadeUp(calm, **factors)
    assert (await machine.find()).best == "f3"
    counts = Counter(machine.measured)
    assert all(counts[f"s{n}"] == 1 for n in range(4))
    assert counts["f3"] > counts["f2"] == counts["f1"] == 2


async def test_nothing_is_faster() -> None:
    found = await MadeUp(a=(1.0, 0.99), b=(0.99, 1.0)).find()
    assert found.verdict == "same"
    found = await MadeUp(a=(0.8, 0.8)).find()
    assert (found.verdict, found.best) == ("same", "a")
    assert gain(found, "decode") == pytest.approx(-0.2)


async def test_a_gain_in_prefill_alone_is_taken() -> None:
    assert (await MadeUp(a=(1.2, 1.0)).find()).verdict == "faster"
    assert (await MadeUp(a=(1.2, 0.95)).find()).verdict == "same"


async def test_what_loses_somewhere_is_not_taken() -> None:
    assert (await MadeUp(a=(2.0, 0.93)).find()).verdict == "mixed"
    assert (await MadeUp(a=(0.9, 1.3)).find()).verdict == "mixed"
    one_text = MadeUp(a=(1.0, 1.6, 0.9))
    one_text.factors["now"] = (1.0, 1.0, 1.0)
    assert (await one_text.find()).verdict == "mixed"


async def test_a_steady_drift_changes_nothing() -> None:
    def cooling(n: int) -> float:
        return 0.985**n

    found = await MadeUp(cooling, a=(1.0, 1.0), b=(1.1, 1.1), c=(0.9, 0.9)).find()
    assert (found.verdict, found.best) == ("faster", "b")
    assert gain(found, "decode") == pytest.approx(0.1, rel=0.01)
    assert (await MadeUp(cooling, a=(1.0, 1.0)).find()).verdict != "faster"


async def test_a_machine_that_becomes_faster_once_changes_nothing() -> None:
    for at in range(16):
        found = await MadeUp(lambda n, at=at: 0.85 if n < at else 1.0, a=(1.01, 1.01)).find()
        assert gain(found, "decode") == pytest.approx(0.01), at


async def test_what_was_disturbed_once_is_measured_again() -> None:
    def gust(n: int) -> float:
        return 0.5 if n == 0 else 1.0  # the first measurement of the anchor

    machine = MadeUp(gust, a=(1.2, 1.2))
    assert (await machine.find()).verdict == "faster"
    assert machine.measured[:5] == ["now", "a", "now", "a", "now"]


async def test_a_busy_machine_is_told_and_nothing_is_taken() -> None:
    def storm(n: int) -> float:
        return (1.0, 0.6, 0.8)[n % 3]

    found = await MadeUp(storm, a=(1.3, 1.3)).find()
    assert found.verdict == "noisy"
    assert found.problem.endswith("%")


async def test_equal_settings_are_hardly_ever_called_faster_and_a_true_five_percent_is_found() -> None:
    """Six choices a run, whose rounds scatter by 2 %: at most 2 % of the runs may be wrong."""
    runs, wrong, found, noise = 100, 0, 0, 0.02 / math.sqrt(1.5)
    for seed in range(6 * runs):
        dice = random.Random(seed)
        equal = await MadeUp(lambda _, dice=dice: 1 + dice.gauss(0, noise), a=(1, 1), b=(1, 1), c=(1, 1)).find()
        wrong += equal.verdict == "faster"
        if seed < runs:
            better = await MadeUp(lambda _, dice=dice: 1 + dice.gauss(0, noise), a=(1, 1), b=(1.05, 1.05)).find()
            found += (better.verdict, better.best) == ("faster", "b")
    assert wrong <= WRONG * runs
    assert found >= 0.9 * runs


async def test_what_cannot_be_measured_is_left_out() -> None:
    found = await MadeUp(broken=(), a=(1.2, 1.2)).find()
    assert (found.verdict, found.best) == ("faster", "a")
    found = await MadeUp(broken=()).find()
    assert (found.verdict, found.best) == ("failed", None)
