"""What the cost model says after the probe alone, against what models do: decoding, prefill, first token, drafting.

    python benchmarks/costs.py [--quick] [--rounds N] [--only 0.5b-Q8_0,draft] [--files FILE...]

One probe (20 s) makes the profile; no model measured afterwards teaches it anything. "cpuchat" is what is predicted,
"baseline" what was measured, both as rates. Models of random weights in real shapes are written one at a time and
deleted (up to 7 GB of disk and 10 GB of memory). Drafting: pairs with a known acceptance rate, at the depths that the
prediction calls best. With --files only these models are predicted and measured. About 17 minutes on two cores that
must be idle; a probe beside other load predicts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from pathlib import Path

import msgspec
from common import MeasureError, Row, Target, arguments, machine, report, run_main, say
from drafting import Side, Workers, compare, fixed, workers
from models import FOLDER
from pairs import Shapes, typical_texts
from planner import decode_rate
from product import PLAIN, default_threads, worker

from cpuchat.backend.local import LocalBackend
from cpuchat.bench.cost_probe import CostProbe
from cpuchat.costs.fit import Observation, fit
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

SHAPES = (("0.05b", None), ("0.5b", None), ("1.5b", None), ("3b", None), ("30b-a3b", 4))
QUANTIZATIONS = ("Q4_K_M", "Q8_0", "F16")
DEPTH, N_GEN = 128, 32
PREFILL, PROMPT = 512, 2000
ALPHAS = (0.6, 0.8, 0.9)
DECODE, PREFILLING, DRAFTED = (0.85, 1.15), (0.8, 1.2), (0.85, 1.15)
N_ANSWER = 97


class Probed(msgspec.Struct):
    """What is usual of such cores at their bandwidth, and the passes of the probe."""

    start: CostProfile
    seen: tuple[Observation, ...]


async def probe(threads: int) -> Probed:
    """Measure the bandwidth and the passes of the probe."""
    spec = PlacementSpec(threads=threads)
    cpus = place(read_topology(), spec).cpus
    peak = measure(cpus).bytes_per_s
    seen = await CostProbe(spec, lambda done, of, what: say(f"probe: {what}, {done + 1} of {of}")).run()
    probed = Probed(usual_here(cpus, peak), tuple(seen))
    say(f"{peak / 1e9:.1f} GB/s; {len(seen)} passes: {fit(probed.start, probed.seen)}")
    return probed


async def seconds(backend: LocalBackend, request: Measure, rounds: int) -> list[float]:
    found: list[float] = []
    for _ in range(rounds):
        done = await backend.measure(request)
        if isinstance(done, Failed):
            raise MeasureError(done.message)
        found.append(done.seconds)
    return found


async def plain_rows(
    profile: CostProfile, shape: str, layers: int | None, quantization: str, rounds: int, threads: int, *, quick: bool
) -> list[Row]:
    """Decoding, prefill and the first token of one model, which is written and deleted."""
    name = f"{shape}{f', {layers} layers' if layers else ''} {quantization}"
    file = FOLDER / f"costs-{shape}-{quantization}.gguf"
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        write_model(file, shape, quantization, layers=layers)
        return await file_rows(profile, file, name, rounds, threads, quick=quick)
    finally:
        file.unlink(missing_ok=True)


async def file_rows(
    profile: CostProfile, file: Path, name: str, rounds: int, threads: int, *, quick: bool
) -> list[Row]:
    work = model_work(read_model(file))
    async with worker(file, LoadOptions(n_ctx=2304), PlacementSpec(threads=threads)) as backend:
        await seconds(backend, Measure(n_prompt=8, n_gen=8, depth=DEPTH), 1)
        decode = await seconds(backend, Measure(n_gen=N_GEN, depth=DEPTH), rounds)
        prefill = await seconds(backend, Measure(n_prompt=PREFILL), 1 if quick else rounds)
        first = [] if quick else await seconds(backend, Measure(n_prompt=PROMPT), max(rounds // 2, 1))
    rows = between(
        f"{name}: decode", "tok/s", decode_rate(profile, work, DEPTH + N_GEN / 2), [N_GEN / one for one in decode],
        DECODE,
    )  # fmt: skip
    for n, took in ((PREFILL, prefill), (PROMPT, first)):
        if took:
            told = n / prefill_cost(profile, work, n).seconds
            what = f"prefill {n}" if n == PREFILL else f"first token at {n}"
            rows += between(f"{name}: {what}", "tok/s", told, [n / one for one in took], PREFILLING)
    for row in rows[::2]:
        say(f"  {row.what}: {row.judged:.3f} of {statistics.median(row.theirs):.1f} {row.unit}")
    return rows


def between(what: str, unit: str, told: float, measured: list[float], limits: tuple[float, float]) -> list[Row]:
    """Two rows: not below, not above."""
    predicted = [told] * len(measured)
    return [
        Row(what, unit, predicted, measured, Target(limits[0])),
        Row(f"{what}, not above", unit, predicted, measured, Target(limits[1], at_least=False)),
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
        rows += between(name, "tok/s", told, runs.rates("drafted"), DRAFTED)
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
    parser.add_argument("--profile", type=Path, help="a file: read the profile from it if it is there, else write it")


def main() -> None:
    options = arguments(__doc__, _options)
    where, threads = machine(), options.threads or default_threads()
    rounds = 1 if options.quick else options.rounds or 3
    known = options.profile
    if known is not None and known.is_file():
        probed = msgspec.json.decode(known.read_bytes(), type=Probed)
    else:
        probed = asyncio.run(probe(threads))
        if known is not None:
            known.write_bytes(msgspec.json.encode(probed))
    profile = fit(probed.start, probed.seen)
    wanted = options.only.split(",") if options.only else []
    rows: list[Row] = []
    for file in options.files or ():
        rows += asyncio.run(file_rows(profile, file, file.stem, rounds, threads, quick=options.quick))
    for shape, layers in () if options.files else SHAPES[:2] if options.quick and not wanted else SHAPES:
        for quantization in QUANTIZATIONS:
            if not wanted or f"{shape}-{quantization}" in wanted:
                rows += asyncio.run(
                    plain_rows(profile, shape, layers, quantization, rounds, threads, quick=options.quick)
                )
    if not options.files and (not wanted or "draft" in wanted):
        with workers(threads) as running:
            for quantization in ("Q8_0",) if options.quick else ("Q8_0", "F16"):
                rows += draft_rows(profile, quantization, rounds, running, quick=options.quick)
    report("costs", where, rows, quick=options.quick or bool(wanted or options.files))


if __name__ == "__main__":
    run_main(main)
