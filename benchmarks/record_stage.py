"""Record what the app replays before there is a model: Qwen2.5 Coder 1.5B plain and with drafts, and its Q4_K_M against
a Q8_0 that is made from it (cpuchat/models/demo/recording-*.json).

    python benchmarks/record_stage.py [--rounds N] [drafts|quantizations]

The recordings tell their speed, so the machine must be quiet: a round that other programs disturbed is refused. The two
sides answer one after the other, each with the whole machine; the last round is recorded, with medians of all.
"""

from __future__ import annotations

import argparse
import asyncio

import msgspec
from coder_pair import coder_pair, larger_target
from common import MeasureError, run_main

from cpuchat.base import paths
from cpuchat.compare.comparison import Comparison
from cpuchat.compare.recording import Recording
from cpuchat.compare.runner import Side
from cpuchat.config.settings import Settings

_CODE = """Add type hints to this code and change nothing else:

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
_QUESTION = "Write a Python function that merges overlapping intervals. Answer with the code alone."
_WARM_UP = "Name three sorting algorithms, each with one sentence about it."


def sides(name: str) -> tuple[Side, Side, str]:
    """Return both sides of a recording, and what they are asked."""
    target, _ = coder_pair()
    if name == "drafts":
        return Side.of(target, {"drafters": "off"}), Side.of(target, {"drafters": "suffix"}), _CODE
    off = {"drafters": "off"}
    return Side.of(larger_target(), off), Side.of(target, off), _QUESTION


async def record(name: str, rounds: int) -> None:
    """Write one recording. Raises MeasureError: an answer failed, or other programs disturbed it."""
    settings = Settings()
    settings.sampling.temperature, settings.engine.n_ctx, settings.chat.max_tokens = 0.0, 4096, 400
    a, b, prompt = sides(name)
    comparison = Comparison((a, b), settings)
    try:
        await comparison.ask(_WARM_UP)
        comparison.restore([])
        await comparison.ask(prompt)
        for _ in range(rounds - 1):
            await comparison.repeat()
    finally:
        await comparison.close()
    recording = Recording.of(comparison, comparison.turns[-1])
    if name == "drafts":
        named = zip(recording.sides, ("plain", "with drafts"), strict=True)
        first, second = (msgspec.structs.replace(side, name=own) for side, own in named)
        recording = msgspec.structs.replace(recording, sides=(first, second))
    model = comparison.runners[1].model
    assert model is not None
    title = model.name.replace(" GGUF", "") + (f" {model.quantization}" if name == "drafts" else "")
    recording = msgspec.structs.replace(recording, title=title)
    if recording.leader is None:
        last = comparison.turns[-1].rounds[-1].answers
        waits = ", ".join(f"{one.timings.cpu_wait or 0:.3f}" for one in last if one.timings is not None)
        why = f"{recording.verdict.kind}, shares of the time that threads waited for a core: {waits}"
        raise MeasureError(f"{name}: {why}. Run it again on a quiet machine.")
    file = paths.recording_file(name)
    file.write_bytes(msgspec.json.encode(recording))
    ends = ", ".join(f"{one.name} {len(one.tokens)} tokens at {one.tok_s or 0:.1f} tok/s" for one in recording.sides)
    print(f"{file}: {ends}, {file.stat().st_size:,} bytes")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=paths.RECORDINGS, help="only this one")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    for name in [chosen.name] if chosen.name else paths.RECORDINGS:
        await record(name, chosen.rounds)


if __name__ == "__main__":
    run_main(lambda: asyncio.run(main()))
