"""How often equal things are called faster or slower, and how often a true difference is found, on machines with noise.

    python benchmarks/differences.py [--runs N]
    python benchmarks/differences.py --record

Noise is made up (normal, one-sided as other programs make it, on a machine that grows slower by a tenth, and on one
that is now and then slower by 5 % for a while), or read from traces of real decoding from a moment drawn at random: one
of a machine that others use too, one in two phases (another program computes half of the time), and the former on a
machine that grows slower. Of traces it is known, as in use, when threads waited for a core. "A round 2 %": what one
round tells scatters by 2 %, and so a measurement by less; all other figures are of one measurement. The thresholds were
chosen with normal noise of other seeds; all the rest was not looked at.
A run of `tune` is six choices with two to six candidates; of modules, its choice among four CPU modules alone; of `why`
and F12, what they say of three tensor types by the kernels' rates that a load measured; of `compare`, up to five rounds
of a prompt, looked at after each; of `bench --diff`, twelve figures at two times, of three rounds, of nine, and of as
many as runs of three rounds ask for. `--record` records the traces anew, of the demo, in three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from common import RESULTS

from cpuchat.backend.loading import load_to_measure
from cpuchat.backend.local import LocalBackend
from cpuchat.bench.results import ASKED, GAIN, MOST_ROUNDS
from cpuchat.compare.figures import asked_after
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.measure.difference import WRONG, Difference, compare, rounds_for
from cpuchat.measure.turns import has_scattered, in_order
from cpuchat.models.library.library import Library
from cpuchat.present.machine import TYPES_TOLD
from cpuchat.protocol.messages import LoadOptions, Measure, Measured
from cpuchat.protocol.timings import MAX_CPU_WAIT
from cpuchat.tune.tuner import search

TRACES = Path(__file__).parent / "noise.json"
CHOICES = (6, 3, 2, 4, 3, 3)
"""Candidates of each choice of a run of `tune`."""
MODULES = 3
"""CPU modules beside the one in use, of which `tune` times at most so many."""
TYPES, TYPE_ROUNDS = 3, 3
"""Tensor types of a model, and rounds in which a load measures each in 0.4 s."""
ROUNDS, FIGURES = 5, 12
N_RECORDED, SECONDS, PHASE = 300, 0.25, 30
GAINS: Final = (0.03, 0.05, 0.1)
T = TypeVar("T")

Noise = Callable[[random.Random], Iterator[tuple[float, bool]]]
"""Factors of one measurement after the other, and whether it is known that other programs ran."""


def made_up(sigma: float, *, one_sided: bool = False, drift: float = 0.0, step: float = 0.0) -> Noise:
    """`drift`: share by which the machine grows slower in 40 measurements. `step`: by which it is slower now and then,
    for 20 measurements on average."""

    def noise(dice: random.Random) -> Iterator[tuple[float, bool]]:
        n, slower = 0, False
        while True:
            log = -dice.expovariate(1 / sigma) if one_sided else dice.gauss(0, sigma)
            slower ^= dice.random() < 0.05
            yield math.exp(log - drift * n / 40 - step * slower), False
            n += 1

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


def tune(choices: Sequence[int], noise: Noise, seed: int, gain: float) -> list[str]:
    """Verdicts of a run of so many candidates of each choice, in which one of each is so much faster."""
    factors = noise(random.Random(seed))

    async def measure(candidate: int) -> dict[str, float]:
        speed = 1 + gain if candidate == 1 else 1.0
        prefill, decode = 100 * speed * next(factors)[0], 20 * speed * next(factors)[0]
        both = 2 * prefill * decode / (prefill + decode)
        return {"overall": both, "decode": decode, "prefill": prefill, "text 0": decode}

    found = [_result(search(measure, 0, list(range(1, 1 + n)))) for n in choices]
    return [one.verdict if not gain or one.best == 1 else "another" for one in found]


def _result(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine does that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def side_by_side(noise: Noise, seed: int, gain: float) -> list[str]:
    """The verdicts after each round of a comparison; A B, B A, ..."""
    factors, rates = noise(random.Random(seed)), ([], [])
    verdicts: list[str] = []
    for number in range(ROUNDS):
        measured = {side: next(factors) for side in in_order((0, 1), number)}
        if not any(disturbed for _, disturbed in measured.values()):
            for side in (0, 1):
                rates[side].append(measured[side][0] * (1 + gain * side))
            verdicts.append(compare(*rates, asked=asked_after(len(rates[0]))).verdict)
    return verdicts if not gain else verdicts[-1:] or ["disturbed"]


def advised(noise: Noise, seed: int, gain: float) -> list[str]:
    """The verdicts on two benchmarks of as many rounds as two of three rounds ask for."""
    scatter = statistics.median(found.error for found, _ in two_runs(3, noise, seed, gain)) * math.sqrt(1.5)
    return benches(rounds_for(GAIN, scatter, ASKED * FIGURES, MOST_ROUNDS) or MOST_ROUNDS, noise, ~seed, gain)


def benches(rounds: int, noise: Noise, seed: int, gain: float) -> list[str]:
    found = two_runs(rounds, noise, seed, gain)
    return ["disturbed" if disturbed else one.verdict for one, disturbed in found]


def two_runs(rounds: int, noise: Noise, seed: int, gain: float) -> list[tuple[Difference, bool]]:
    """Compare two benchmarks, each of which measures all figures in every round; whether other programs ran, too."""
    dice = random.Random(seed)
    runs: list[list[list[tuple[float, bool]]]] = []
    for factors in (noise(dice), noise(dice)):
        measured: list[list[tuple[float, bool]]] = [[] for _ in range(FIGURES)]
        for number in range(rounds):
            for figure in in_order(measured, number):
                figure.append(next(factors))
        runs.append(measured)
    found: list[tuple[Difference, bool]] = []
    for both in zip(*runs, strict=True):
        a, b = ([rate for rate, _ in side] for side in both)
        disturbed = any(one[1] for side in both for one in side) or has_scattered(a) or has_scattered(b)
        found.append((compare(a, [rate * (1 + gain) for rate in b], asked=ASKED * FIGURES, apart=True), disturbed))
    return found


def kernels(noise: Noise, seed: int, gain: float) -> list[str]:
    """What `why` and F12 say of cpuchat's kernels against llama.cpp's: of each type the best of some rounds in turn."""
    factors, found = noise(random.Random(seed)), list[str]()
    for _ in range(TYPES):
        measured: tuple[list[tuple[float, bool]], ...] = ([], [])
        for number in range(TYPE_ROUNDS):
            for side in in_order((0, 1), number):
                measured[side].append(next(factors))
        disturbed = any(one[1] for side in measured for one in side)
        theirs, ours = (max(rate for rate, _ in side) for side in measured)
        found.append("disturbed" if disturbed else compare([theirs], [(1 + gain) * ours], asked=TYPES_TOLD).verdict)
    return found


RUNS: Final[dict[str, tuple[Callable[[Noise, int, float], list[str]], float]]] = {
    "tune": (partial(tune, CHOICES), math.sqrt(1.5)),
    "modules": (partial(tune, (MODULES,)), math.sqrt(1.5)),
    "kernels in why and F12": (kernels, math.sqrt(2)),
    "compare": (side_by_side, math.sqrt(2)),
    "bench --diff": (partial(benches, 3), math.sqrt(2)),
    "bench --diff, 9 rounds": (partial(benches, 9), math.sqrt(2)),
    "bench --diff, rounds asked for": (advised, math.sqrt(2)),
}
"""What a run is, and how many times as much as a measurement one round scatters."""


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
        **{f"normal {100 * sigma:.0f} %": made_up(sigma) for sigma in (0.01, 0.02, 0.03)},
        **{f"one-sided {100 * sigma:.0f} %": made_up(sigma, one_sided=True) for sigma in (0.01, 0.02, 0.03)},
        "normal 2 %, slower by a tenth": made_up(0.02, drift=0.1),
        "normal 2 %, in steps of 5 %": made_up(0.02, step=0.05),
        "trace": traced(traces["steady"]),
        "trace in two phases": traced(traces["phases"]),
        "trace with drift": traced(traces["steady"], 0.1),
    }
    print(
        f"{options.runs} runs\n\n| | noise | wrong, of whole runs | 3 % found | 5 % | 10 % |\n|---|---|---|---|---|---|"
    )
    rows: list[dict[str, Any]] = []
    for what, (run, scatter) in RUNS.items():
        for name, noise in {"a round 2 %": made_up(0.02 / scatter), **machines}.items():
            told = [{*run(noise, seed, 0.0)} & {"faster", "slower"} for seed in range(options.runs)]
            wrong = sum(map(bool, told)) / options.runs
            found = [_found(run, noise, gain, max(options.runs // 10, 1)) for gain in GAINS]
            rows.append({"run": what, "noise": name, "wrong": wrong, "gains": GAINS, "found": found})
            print(f"| {what} | {name} | {wrong:.2%} | {' | '.join(f'{one:.0%}' for one in found)} |", flush=True)
    worst = max(row["wrong"] for row in rows)
    print(f"\nAt most {WRONG:.0%} of runs wrong: {'reached' if worst <= WRONG else 'not reached'}.")
    (RESULTS / "differences.json").write_text(json.dumps({"runs": options.runs, "rows": rows}) + "\n")


def _found(run: Callable[[Noise, int, float], list[str]], noise: Noise, gain: float, runs: int) -> float:
    found = [verdict for seed in range(runs) for verdict in run(noise, seed, gain)]
    return found.count("faster") / len(found)


if __name__ == "__main__":
    main()
