"""Record an answer of a real model with its draft model, which `cpuchat demo --tour` plays beside what runs live
(cpuchat/models/demo/recording.json).

    python benchmarks/record_tour.py [TARGET.gguf DRAFT.gguf] [--question TEXT] [--max-tokens N] [--depth N]

Without files: Qwen2.5 Coder 1.5B with its 0.5B (coder_pair.py). The tour tells the speed of the recording, so the
machine must be quiet. The load calibrates, another question warms the caches, and the answer is recorded, if it ends by
itself and takes no longer than the tour shows it.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from time import monotonic

import msgspec
from coder_pair import coder_pair

from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol.messages import (
    Failed,
    Generate,
    GenerationFinished,
    LoadOptions,
    Message,
    ModelInfo,
    ModelLoaded,
    Sampling,
    Speculation,
    TextDelta,
)
from cpuchat.protocol.timings import Timings
from cpuchat.tui.tour import BESIDE_SECONDS, Recording, TourText

WARM_UP = "Name three sorting algorithms, each with one sentence about it."
"""Another question: the same answer could be drafted from the first one."""
QUESTION = """Add type hints to this code and change nothing else:

def mean(values):
    return sum(values) / len(values)

def variance(values):
    average = mean(values)
    return sum((value - average) ** 2 for value in values) / len(values)

def histogram(values, bins):
    low, high = min(values), max(values)
    width = (high - low) / bins
    counts = [0] * bins
    for value in values:
        index = min(int((value - low) / width), bins - 1)
        counts[index] += 1
    return counts
"""
"""An answer that repeats code: what the free drafters are for."""
DEPTH = 3
"""Of the recording in the package."""


async def load(backend: LocalBackend, target: Path, draft: Path) -> ModelInfo:
    """Load the pair. Exits if it fails, or without the draft model."""
    async for event in backend.load(target, LoadOptions(n_ctx=4096, draft_path=str(draft), probe=True, calibrate=True)):
        if isinstance(event, Failed):
            raise SystemExit(f"{event.message} {event.hint}")
        if isinstance(event, ModelLoaded):
            if not event.model.draft:
                raise SystemExit(" ".join(event.model.notes) or "The draft model was not loaded.")
            return event.model
    raise SystemExit("The load ended without a model.")


def ask(question: str, chosen: argparse.Namespace) -> Generate:
    """Return a request for a greedy answer with drafts."""
    return Generate(
        messages=(Message(role="user", content=question),),
        sampling=Sampling(temperature=0.0),
        max_tokens=chosen.max_tokens,
        speculation=Speculation(drafters=("suffix", "draft"), depth=chosen.depth),
    )


async def answer(backend: LocalBackend, request: Generate) -> tuple[list[TourText], Timings]:
    """Return the parts of one answer with the seconds at which they came, and its figures."""
    parts: list[TourText] = []
    began = monotonic()
    async for event in backend.generate(request):
        match event:
            case TextDelta():
                parts.append(TourText(round(monotonic() - began, 3), event.text, event.drafter))
            case GenerationFinished():
                if event.stop_reason != "end":
                    raise SystemExit(f"The answer did not end: {event.stop_reason}. Ask for a shorter one.")
                return parts, event.timings
            case Failed():
                raise SystemExit(f"{event.message} {event.hint}")
            case _:
                pass
    raise SystemExit("The worker sent no end.")


def named(name: str, quantization: str) -> str:
    """The name from a header, without the file format that some have in it."""
    return f"{name.removesuffix(' GGUF')} {quantization}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="target and draft model")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--depth", type=int, default=DEPTH, help=f"draft depth; 0 = adaptive (default {DEPTH})")
    chosen = parser.parse_args()
    if len(chosen.files) not in (0, 2):
        parser.error("give both files, or none")
    target, draft = chosen.files or coder_pair()
    backend = LocalBackend()
    try:
        model = await load(backend, target, draft)
        await answer(backend, ask(WARM_UP, chosen))
        parts, timings = await answer(backend, ask(chosen.question, chosen))
    finally:
        await backend.close()
    if parts[-1].at > BESIDE_SECONDS:
        raise SystemExit(f"The answer took {parts[-1].at:.0f} s; the tour shows {BESIDE_SECONDS:.0f}. Ask for less.")
    recording = Recording(
        question=chosen.question,
        model=named(model.name, model.quantization),
        draft=named(model.draft, model.draft_quantization),
        machine=f"{read_topology().cpu_name}, {model.n_threads} threads",
        parts=tuple(parts),
        timings=timings,
    )
    file = paths.recording_file()
    file.write_bytes(msgspec.json.encode(recording))
    rate, factor = timings.predicted_per_second or 0.0, timings.speed_up
    gain = f"{factor:.2f}× vs plain" if factor else "no plain speed known"
    print(f"{file}: {timings.predicted_n} tokens, {rate:.1f} tok/s, {gain}, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    asyncio.run(main())
