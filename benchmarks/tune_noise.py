"""How often `tune` calls equal settings faster, and how often it finds a gain, on made-up machines with noise.

    python benchmarks/tune_noise.py [--runs N]

A run is six choices with two to six candidates, as on a real machine; every measurement is off by noise of its own
(normal, or one-sided as other programs make it) and by a drift of all. No model is loaded: minutes of tuning take
milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from cpuchat.tune.halving import Halving, HalvingResult, Speed

CHOICES = (6, 3, 2, 4, 3, 3)
"""Candidates of each choice of a run."""
MAX_WRONG = 0.02
"""Share of runs in which equal settings may be called faster."""


@dataclass
class Machine:
    """`gain` is that of one candidate of each choice; all others are equal to the setting in use."""

    dice: random.Random
    noise: Callable[[random.Random], float]
    gain: float = 1.0
    measured: int = 0

    async def measure(self, candidate: int, rung: int) -> Speed:
        self.measured += 1
        drift = 1 + 0.01 * random.Random(self.measured // 20).random()
        factor = self.gain if candidate == 1 else 1.0
        prefill, decode = (drift * factor * (1 + self.noise(self.dice)) for _ in range(2))
        return Speed(prefill=100 * prefill, decode=(20 * decode,))


def normal(sigma: float) -> Callable[[random.Random], float]:
    return lambda dice: dice.gauss(0, sigma)


def one_sided(sigma: float) -> Callable[[random.Random], float]:
    return lambda dice: -dice.expovariate(1 / sigma)


async def run(machine: Machine) -> list[HalvingResult[int]]:
    return [await Halving(machine.measure, 0.5).run(0, list(range(1, 1 + candidates))) for candidates in CHOICES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    print(f"{runs} runs of {len(CHOICES)} choices\n")
    print("| noise of a measurement | wrongly faster, per run | measurements per run | 3 % found | 5 % | 10 % | 20 % |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for name, noise in (("normal", normal), ("one-sided", one_sided)):
        for sigma in (0.01, 0.02, 0.03):
            wrong = measured = 0
            for seed in range(runs):
                machine = Machine(random.Random(seed), noise(sigma))
                wrong += any(found.verdict == "faster" for found in asyncio.run(run(machine)))
                measured += machine.measured
            found = [_found(noise(sigma), gain, max(runs // 10, 1)) for gain in (1.03, 1.05, 1.1, 1.2)]
            worst = max(worst, wrong / runs)
            powers = " | ".join(f"{100 * share:.0f} %" for share in found)
            print(f"| {name} {100 * sigma:.0f} % | {100 * wrong / runs:.1f} % | {measured / runs:.0f} | {powers} |")
    print(f"\nAt most {100 * MAX_WRONG:.0f} % of runs wrong: {'reached' if worst <= MAX_WRONG else 'not reached'}.")


def _found(noise: Callable[[random.Random], float], gain: float, runs: int) -> float:
    found = [one for seed in range(runs) for one in asyncio.run(run(Machine(random.Random(seed), noise, gain)))]
    return sum(one.verdict == "faster" and one.best == 1 for one in found) / len(found)


if __name__ == "__main__":
    main()
