"""How often equal things are called faster or slower, and how often a true difference is found, on machines with noise.

    python benchmarks/differences.py [--runs N]
    python benchmarks/differences.py --record

Noise is made up (normal, one-sided as other programs make it), or read from traces of real decoding from a moment drawn
at random: one of a machine that others use too, one in two phases (another program computes half of the time), and the
former on a machine that grows slower by a tenth. Of traces it is known, as in use, when threads waited for a core.
A run of `tune` is six choices with two to six candidates; of `compare`, up to five rounds of a prompt, looked at after
each; of `bench --diff`, twelve figures at two times. `--record` records the traces anew, of the demo, in three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from cpuchat.backend.loading import load_to_measure
from cpuchat.backend.local import LocalBackend
from cpuchat.compare.figures import LOOKS
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.measure.difference import WRONG, compare
from cpuchat.measure.turns import has_drifted, in_order
from cpuchat.models.library.library import Library
from cpuchat.protocol.messages import LoadOptions, Measure, Measured
from cpuchat.protocol.timings import MAX_CPU_WAIT
from cpuchat.tune.search import Speed, search

TRACES = Path(__file__).parent / "noise.json"
CHOICES = (6, 3, 2, 4, 3, 3)
"""Candidates of each choice of a run of `tune`."""
ROUNDS, FIGURES = 5, 12
N_RECORDED, SECONDS, PHASE = 300, 0.25, 30

Noise = Callable[[random.Random], Iterator[tuple[float, bool]]]
"""Factors of one measurement after the other, and whether it is known that other programs ran."""


def normal(sigma: float) -> Noise:
    def noise(dice: random.Random) -> Iterator[tuple[float, bool]]:
        while True:
            yield math.exp(dice.gauss(0, sigma)), False

    return noise


def one_sided(sigma: float) -> Noise:
    def noise(dice: random.Random) -> Iterator[tuple[float, bool]]:
        while True:
            yield math.exp(-dice.expovariate(1 / sigma)), False

    return noise


def traced(rates: list[tuple[float, float]], drift: float = 0.0) -> Noise:
    """`drift`: share by which the machine is slower after the whole trace, and as fast again after twice that."""

    def noise(dice: random.Random) -> Iterator[tuple[float, bool]]:
        start, n = dice.randrange(len(rates)), 0
        while True:
            there, back = (start + n) % len(rates), (start + n) % (2 * len(rates))
            rate, cpu_wait = rates[there]
            yield rate * (1 - drift * min(back, 2 * len(rates) - back) / len(rates)), cpu_wait > MAX_CPU_WAIT
            n += 1

    return noise


def tune(noise: Noise, seed: int, gain: float) -> list[str]:
    """Verdicts of a run in which one candidate of each choice is so much faster."""
    dice = random.Random(seed)
    factors = noise(dice)

    async def measure(candidate: int) -> dict[str, float]:
        speed = 1 + gain if candidate == 1 else 1.0
        prefill, decode = next(factors)[0], next(factors)[0]
        return Speed(prefill=100 * speed * prefill, decode=(20 * speed * decode,)).rates()

    async def run() -> list[str]:
        found = [await search(measure, 0, list(range(1, 1 + n))) for n in CHOICES]
        return [one.verdict if not gain or one.best == 1 else "another" for one in found]

    return asyncio.run(run())


def side_by_side(noise: Noise, seed: int, gain: float) -> list[str]:
    """The verdicts after each round of a comparison; A B, B A, ..."""
    factors, rates = noise(random.Random(seed)), ([], [])
    verdicts: list[str] = []
    for number in range(ROUNDS):
        measured = {side: next(factors) for side in in_order((0, 1), number)}
        if not any(disturbed for _, disturbed in measured.values()):
            for side in (0, 1):
                rates[side].append(measured[side][0] * (1 + gain * side))
            verdicts.append(compare(*rates, asked=LOOKS).verdict)
    return verdicts if not gain else verdicts[-1:] or ["disturbed"]


def benches(noise: Noise, seed: int, gain: float) -> list[str]:
    """The verdicts on two benchmarks of three rounds."""
    dice = random.Random(seed)
    before, after = noise(dice), noise(dice)
    found: list[str] = []
    for _ in range(FIGURES):
        both = [[next(side) for _ in range(3)] for side in (before, after)]
        a, b = ([rate for rate, _ in side] for side in both)
        disturbed = any(one[1] for side in both for one in side) or any(
            has_drifted(min(one), max(one)) for one in (a, b)
        )
        verdict = compare(a, [rate * (1 + gain) for rate in b], asked=FIGURES, apart=True).verdict
        found.append("disturbed" if disturbed else verdict)
    return found


RUNS = {"tune": tune, "compare": side_by_side, "bench --diff": benches}


async def record(phases: bool) -> list[tuple[float, float]]:
    """Rates of decoding the demo on one core, in spans of `SECONDS`, and the share for which threads waited."""
    backend, other = LocalBackend(), None
    try:
        file = Library([]).resolve("demo")
        await load_to_measure(backend, file, LoadOptions(n_ctx=1024), PlacementSpec(threads=1), lambda: False)

        async def rate(tokens: int) -> tuple[float, float]:
            found = await backend.measure(Measure(n_prompt=0, n_gen=tokens, depth=0))
            assert isinstance(found, Measured)
            return round(tokens / found.seconds, 1), round(found.cpu_wait or 0.0, 3)

        tokens = min(max(int(SECONDS * (await rate(64))[0]), 16), 900)
        rates: list[tuple[float, float]] = []
        for number in range(N_RECORDED):
            if phases and number % PHASE == 0:
                if other is not None:
                    other.kill()
                    other.wait()
                other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if number // PHASE % 2 else None
            rates.append(await rate(tokens))
        return rates
    finally:
        if other is not None:
            other.kill()
        await backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.record:
        traces = {name: asyncio.run(record(name == "phases")) for name in ("steady", "phases")}
        TRACES.write_text(json.dumps(traces) + "\n")
    traces = json.loads(TRACES.read_text())
    machines = {
        **{f"normal {100 * sigma:.0f} %": normal(sigma) for sigma in (0.01, 0.02, 0.03)},
        **{f"one-sided {100 * sigma:.0f} %": one_sided(sigma) for sigma in (0.01, 0.02, 0.03)},
        "trace": traced(traces["steady"]),
        "trace in two phases": traced(traces["phases"]),
        "trace with drift": traced(traces["steady"], 0.1),
    }
    print(
        f"{options.runs} runs\n\n| | noise | wrong, of whole runs | 3 % found | 5 % | 10 % |\n|---|---|---|---|---|---|"
    )
    worst = 0.0
    for what, run in RUNS.items():
        for name, noise in machines.items():
            told = [set(run(noise, seed, 0.0)) & {"faster", "slower"} for seed in range(options.runs)]
            wrong = sum(map(bool, told)) / options.runs
            worst = max(worst, wrong)
            powers = " | ".join(f"{_found(run, noise, gain, options.runs // 10):.0%}" for gain in (0.03, 0.05, 0.1))
            print(f"| {what} | {name} | {wrong:.2%} | {powers} |", flush=True)
    print(f"\nAt most {WRONG:.0%} of runs wrong: {'reached' if worst <= WRONG else 'not reached'}.")


def _found(run: Callable[[Noise, int, float], list[str]], noise: Noise, gain: float, runs: int) -> float:
    found = [verdict for seed in range(max(runs, 1)) for verdict in run(noise, seed, gain)]
    return found.count("faster") / len(found)


if __name__ == "__main__":
    main()
