"""What the cost model says after the probe alone, against what models do: decoding, prefill, first token, drafting.

    python benchmarks/costs.py [--quick] [--rounds N] [--only 0.5b-Q8_0,draft] [--files FILE...]

A probe makes the profile, in turn with the passes of the model; no model teaches it anything. "cpuchat" is what is
predicted, "baseline" what was measured, both as rates. Models of random weights in real shapes are written one at a
time and deleted (up to 7 GB of disk and 10 GB of memory). Drafting: pairs with a known acceptance rate, at the depths
that the prediction calls best. With --files only these models are predicted and measured. About 30 minutes on two
cores that must be idle; a probe beside other load predicts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from pathlib import Path

from common import MeasureError, Row, Target, arguments, machine, report, run_main, say
from drafting import Side, Workers, compare, fixed, workers
from models import FOLDER
from pairs import Shapes, typical_texts
from planner import decode_rate
from product import PLAIN, default_threads, worker

from cpuchat.backend.local import LocalBackend
from cpuchat.bench.cost_probe import CostProbe
from cpuchat.costs.fit import fit
from cpuchat.costs.model import CostProfile, pair_costs, prefill_cost, tokens_per_pass
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.measure.peak import measure
from cpuchat.models.drafts.candidates import gain
from cpuchat.models.gguf.header import read_model
from cpuchat.models.machine import usual_here
from cpuchat.models.synthetic.model import write_model
from cpuchat.models.traffic import model_work
from cpuchat.protocol.messages import Failed, LoadOptions, Measure
from cpuchat.protocol.model_info import ModelWork
from tests.support.shapes import shape_of

SHAPES = (("0.05b", None), ("0.5b", None), ("1.5b", None), ("3b", None), ("30b-a3b", 4))
QUANTIZATIONS = ("Q4_K_M", "Q8_0", "F16")
DEPTH, N_GEN = 128, 32
PREFILL, PROMPT = 512, 2000
ALPHAS = (0.6, 0.8, 0.9)
DECODE, PREFILLING, DRAFTED = (0.85, 1.15), (0.8, 1.2), (0.85, 1.15)
N_ANSWER = 97


async def probed(spec: PlacementSpec, work: ModelWork | None = None) -> CostProfile:
    """The profile after the bandwidth and the passes of a probe: all of them, or those of the types in `work`."""
    cpus = place(read_topology(), spec).cpus
    peak = measure(cpus).bytes_per_s
    types = None
    if work is not None:
        types = {one.type for one in (*work.dense, *work.head)} | {f"{one.type} experts" for one in work.experts}
    return fit(usual_here(cpus, peak), tuple(await CostProbe(spec).run(types=types)))


async def seconds(backend: LocalBackend, request: Measure) -> float:
    done = await backend.measure(request)
    if isinstance(done, Failed):
        raise MeasureError(done.message)
    return done.seconds


async def plain_rows(
    shape: str, layers: int | None, quantization: str, rounds: int, threads: int, *, quick: bool
) -> list[Row]:
    """Decoding, prefill and the first token of one model, which is written and deleted."""
    name = f"{shape}{f', {layers} layers' if layers else ''} {quantization}"
    file = FOLDER / f"costs-{shape}-{quantization}.gguf"
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        write_model(file, shape_of(shape, layers), quantization)
        return await file_rows(file, name, rounds, threads, quick=quick)
    finally:
        file.unlink(missing_ok=True)


async def file_rows(file: Path, name: str, rounds: int, threads: int, *, quick: bool) -> list[Row]:
    """The same of a file. Every round probes the types in it anew, in turn with its passes: a shared machine's clock
    and bandwidth change by half within minutes, which is no error of the prediction."""
    work, spec = model_work(read_model(file)), PlacementSpec(threads=threads)
    asked = {"decode": (Measure(n_gen=N_GEN, depth=DEPTH), N_GEN, DECODE)}
    for n, what in ((PREFILL, f"prefill {PREFILL}"), (PROMPT, f"first token at {PROMPT}"))[: 1 if quick else 2]:
        asked[what] = (Measure(n_prompt=n), n, PREFILLING)
    told, measured = {what: [] for what in asked}, {what: [] for what in asked}
    async with worker(file, LoadOptions(n_ctx=2304), spec) as backend:
        for number in range(rounds):
            profile = None if number % 2 else await probed(spec, work)
            await seconds(backend, Measure(n_prompt=8, n_gen=8, depth=DEPTH))
            for what, (request, n, _) in asked.items():
                measured[what].append(n / await seconds(backend, request))
            profile = profile or await probed(spec, work)
            for what, (request, n, _) in asked.items():
                is_decode = bool(request.n_gen)
                rate = decode_rate(profile, work, DEPTH + N_GEN / 2) if is_decode else None
                told[what].append(rate or n / prefill_cost(profile, work, n).seconds)
    rows: list[Row] = []
    for what, (_, _, limits) in asked.items():
        rows += between(f"{name}: {what}", "tok/s", told[what], measured[what], limits)
        say(f"  {rows[-2].what}: {rows[-2].judged:.3f} of {statistics.median(measured[what]):.1f} tok/s")
    return rows


def between(what: str, unit: str, told: list[float], measured: list[float], limits: tuple[float, float]) -> list[Row]:
    """Two rows: not below, not above."""
    return [
        Row(what, unit, told, measured, Target(limits[0])),
        Row(f"{what}, not above", unit, told, measured, Target(limits[1], at_least=False)),
    ]


def draft_rows(profile: CostProfile, quantization: str, rounds: int, running: Workers, *, quick: bool) -> list[Row]:
    """A target of 1.5B with a draft of 0.05B, at the depth that the prediction calls best."""
    shapes, rows = Shapes(), []
    before = set(FOLDER.glob("*.gguf"))
    target_file = shapes.target_file(quantization)
    target = work_of(target_file)
    for alpha in ALPHAS[-1:] if quick else ALPHAS:
        file = shapes.draft_file(alpha)
        draft = work_of(file)
        costs = pair_costs(profile, target, draft, N_ANSWER / 2, 32)
        depth = gain([1e3 * one for one in costs.verify], 1e3 * costs.draft, alpha).depth or 3
        backend = running.load(target_file, file, calibrate=False)
        n = 33 if quick else N_ANSWER
        texts = typical_texts(shapes.n_vocab, alpha, n, rounds, [depth])
        runs = compare(running, {"plain": Side(backend, PLAIN), "drafted": Side(backend, fixed(depth))}, texts, n)
        told = tokens_per_pass(alpha, depth) / (costs.verify[depth] + depth * costs.draft)
        name = f"1.5b {quantization} with 0.05b, α {alpha:g}, depth {depth}"
        rates = runs.rates("drafted")
        rows += between(name, "tok/s", [told] * len(rates), rates, DRAFTED)
        say(f"  {name}: {rows[-2].judged:.3f}")
        running.run(backend.close())  # type: ignore[arg-type]
    for file in set(FOLDER.glob("*.gguf")) - before:
        file.unlink()
    return rows


def work_of(file: Path) -> ModelWork:
    return model_work(read_model(file))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="SHAPE-QUANTIZATION and `draft`, with commas between them")
    parser.add_argument("--threads", type=int, default=0, help="0: cpuchat's choice")
    parser.add_argument("--files", type=Path, nargs="+", help="predict and measure only these models")


def main() -> None:
    options = arguments(__doc__, _options)
    where, threads = machine(), options.threads or default_threads()
    rounds = 1 if options.quick else options.rounds or 3
    wanted = options.only.split(",") if options.only else []
    rows: list[Row] = []
    for file in options.files or ():
        rows += asyncio.run(file_rows(file, file.stem, rounds, threads, quick=options.quick))
    for shape, layers in () if options.files else SHAPES[:2] if options.quick and not wanted else SHAPES:
        for quantization in QUANTIZATIONS:
            if not wanted or f"{shape}-{quantization}" in wanted:
                rows += asyncio.run(plain_rows(shape, layers, quantization, rounds, threads, quick=options.quick))
    if not options.files and (not wanted or "draft" in wanted):
        profile = asyncio.run(probed(PlacementSpec(threads=threads)))
        with workers(threads) as running:
            for quantization in ("Q8_0",) if options.quick else ("Q8_0", "F16"):
                rows += draft_rows(profile, quantization, rounds, running, quick=options.quick)
    report("costs", where, rows, quick=options.quick or bool(wanted or options.files))


if __name__ == "__main__":
    run_main(main)
