"""The memory that is told of a model before it is loaded, against what the worker process then takes.

    python benchmarks/prediction.py [--quick] [--rounds N] [--tokens N] [--threads N] [--only Q8_0,Q4_K_M]

"cpuchat" is what was predicted, "baseline" what the system says of the worker: VmRSS, and RssAnon for what the model
gives back when it is unloaded. Predicted speed has a script of its own: costs.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from common import WORK, MeasureError, Row, Target, arguments, machine, report, run_main, say
from models import FOLDER, model, words
from product import answer, default_threads, worker

from cpuchat.hardware.memory import available_bytes, total_bytes
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.machine import Machine, unloaded_bytes
from cpuchat.models.prediction import predict
from cpuchat.models.synthetic.model import write_model
from cpuchat.protocol.messages import LoadOptions
from tests.support.shapes import shape_of

N_CTX = 4096
PROMPT_TOKENS = 32
QUANTIZATIONS = ("Q8_0", "Q4_K_M")
MIXTURE_LAYERS = 4  # of 48: 1.9 GB
NEAR = (0.85, 1.15)
ENOUGH = (1.0, 1.25)  # never less than it takes


@dataclass(frozen=True)
class Case:
    """A model to be loaded, with a draft model or without, and the header that all is told from."""

    name: str
    file: Path
    draft: Path | None = None

    @property
    def header(self) -> GGUFHeader:
        return read_model(self.file)

    def options(self) -> LoadOptions:
        draft = str(self.draft) if self.draft is not None else ""
        return LoadOptions(n_ctx=N_CTX, draft_path=draft)


@dataclass
class Told:
    """Predicted and measured, one of each in a round, in GB."""

    rss: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)


def cases(quantization: str) -> list[Case]:
    small, large = model("0.5b", quantization), model("1.5b", quantization)
    found = [Case(f"0.5b {quantization}", small), Case(f"1.5b {quantization}", large)]
    if quantization == "Q8_0":
        found.append(Case("1.5b Q8_0 with a draft of 0.5b", large, small))
    if quantization == "Q4_K_M":
        mixture = FOLDER / f"mixture-{MIXTURE_LAYERS}-{quantization}.gguf"
        if not mixture.is_file():
            say(f"writing {mixture.name}")
            write_model(mixture, shape_of("30b-a3b", MIXTURE_LAYERS), quantization)
        found.append(Case(f"30b-a3b {quantization}, {MIXTURE_LAYERS} layers", mixture))
    return found


async def observe(case: Case, told: Told, number: int, n_tokens: int, n_threads: int) -> None:
    """One round of one model."""
    options = case.options()
    async with worker(case.file, options, PlacementSpec(threads=n_threads)) as backend:
        info = backend.model
        if info is None or backend.pid is None:
            raise MeasureError("the worker is gone")
        await answer(backend, words(PROMPT_TOKENS, number), n_tokens, to_the_end=False)
        memory = psutil.Process(backend.pid).memory_info()
    here = Machine(available=available_bytes(), total=total_bytes())
    draft = read_model(case.draft) if case.draft is not None else None
    seen = predict(case.header, options, here, draft=draft)
    if draft is None:
        told.own.append((memory.rss - memory.shared) / 1e9)
        told.back.append(unloaded_bytes(info, options) / 1e9)
    told.rss.append(memory.rss / 1e9)
    told.total.append((seen.need.total + (seen.draft_need.total if seen.draft_need is not None else 0)) / 1e9)
    say(f"  round {number + 1} {case.name}: {memory.rss / 1e9:.2f} GB of {told.total[-1]:.2f}")


async def compare(quantization: str, rounds: int, n_tokens: int, n_threads: int) -> list[Row]:
    """All models of one quantization, in turn."""
    chosen = cases(quantization)
    told = {case.name: Told() for case in chosen}
    for number in range(rounds):
        for case in chosen:
            await observe(case, told[case.name], number, n_tokens, n_threads)
    return [row for case in chosen for row in rows_of(case.name, told[case.name])]


def rows_of(name: str, told: Told) -> list[Row]:
    rows = between(f"{name}: memory", "GB", told.total, told.rss, ENOUGH)
    if told.back:
        rows += between(f"{name}: memory given back", "GB", told.back, told.own, NEAR)
    return rows


def between(
    what: str, unit: str, predicted: list[float], measured: list[float], limits: tuple[float, float]
) -> list[Row]:
    """Two rows: not below, not above."""
    least, most = limits
    return [
        Row(what, unit, predicted, measured, Target(least)),
        Row(f"{what}, not above", unit, predicted, measured, Target(most, at_least=False)),
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(QUANTIZATIONS), help="quantizations, with commas between them")
    parser.add_argument("--tokens", type=int, default=0, help="per answer (0: the script's choice)")
    parser.add_argument("--threads", type=int, default=0, help="0: cpuchat's choice")


def main() -> None:
    options = arguments(__doc__, _options)
    # What was measured here is kept apart from the user's own folder.
    os.environ["CPUCHAT_CACHE_DIR"] = str(WORK / "cache")
    where = machine()
    rounds, tokens = (1, 16) if options.quick else (options.rounds or 5, options.tokens or 96)
    rows: list[Row] = []
    for quantization in options.only.split(","):
        rows += asyncio.run(compare(quantization, rounds, tokens, options.threads or default_threads()))
    report("prediction", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
