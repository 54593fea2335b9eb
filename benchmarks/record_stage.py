"""Record what the app replays before there is a model: Qwen2.5 Coder 1.5B plain and with drafts, and its Q4_K_M against
a Q8_0 that is made from it (cpuchat/models/demo/recording-*.json).

    python benchmarks/record_stage.py [--rounds N] [drafts|quantizations]

The recordings tell their speed, so the machine must be quiet: rounds that other programs disturbed do not count. The
two sides answer one after the other, each with the whole machine; the last round is recorded, with medians of all. An
answer whose code is wrong (`checked.py`) is not recorded.
"""

from __future__ import annotations

import argparse
import asyncio

import msgspec
from checked import HINTS, INTERVALS, CheckedPrompt
from coder_pair import coder_pair, larger_target
from common import MeasureError, run_main

from cpuchat.base import paths
from cpuchat.compare.comparison import Comparison
from cpuchat.compare.recording import Recording
from cpuchat.compare.runner import Side
from cpuchat.config.settings import Settings

RECORDINGS = ("drafts", "quantizations")
_WARM_UP = "Name three sorting algorithms, each with one sentence about it."


def sides(name: str) -> tuple[Side, Side, CheckedPrompt]:
    """Return both sides of a recording, and what they are asked."""
    target, _ = coder_pair()
    if name == "drafts":
        return Side.of(target, {"drafters": "off"}), Side.of(target, {"drafters": "suffix"}), HINTS
    off = {"drafters": "off"}
    return Side.of(larger_target(), off), Side.of(target, off), INTERVALS


async def record(name: str, rounds: int) -> None:
    """Write one recording. Raises MeasureError: an answer failed or is wrong, or other programs disturbed it."""
    settings = Settings()
    settings.sampling.temperature, settings.engine.n_ctx, settings.chat.max_tokens = 0.0, 4096, 400
    a, b, prompt = sides(name)
    comparison = Comparison((a, b), settings)
    try:
        await comparison.ask(_WARM_UP)
        comparison.restore([])
        await comparison.ask(prompt.text)
        turn = comparison.turns[-1]
        while len(turn.rounds) < 3 * rounds and sum(not one.disturbed for one in turn.rounds) < rounds:
            await comparison.repeat()
    finally:
        await comparison.close()
    recording = Recording.of(comparison, turn)
    for side in recording.sides:
        prompt.check("".join(text for text, _ in side.tokens))
    if name == "drafts":
        named = zip(recording.sides, ("plain", "with drafts"), strict=True)
        first, second = (msgspec.structs.replace(side, name=own) for side, own in named)
        recording = msgspec.structs.replace(recording, sides=(first, second))
    model = comparison.runners[1].model
    assert model is not None
    title = model.name.replace(" GGUF", "") + (f" {model.quantization}" if name == "drafts" else "")
    recording = msgspec.structs.replace(recording, title=title)
    if recording.leader is None:
        last = turn.rounds[-1].answers
        waits = ", ".join(f"{one.timings.cpu_wait or 0:.3f}" for one in last if one.timings is not None)
        why = f"{recording.verdict.kind}, shares of the time that threads waited for a core: {waits}"
        raise MeasureError(f"{name}: {why}. Run it again on a quiet machine.")
    file = paths.recording_file(name)
    file.write_bytes(msgspec.json.encode(recording))
    ends = ", ".join(f"{one.name} {len(one.tokens)} tokens at {one.tok_s or 0:.1f} tok/s" for one in recording.sides)
    print(f"{file}: {ends}, {file.stat().st_size:,} bytes")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=RECORDINGS, help="only this one")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    for name in [chosen.name] if chosen.name else RECORDINGS:
        await record(name, chosen.rounds)


if __name__ == "__main__":
    run_main(lambda: asyncio.run(main()))
