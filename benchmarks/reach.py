"""How much of the measured read bandwidth decoding reaches, and whether the utilization that is shown is right.

    python benchmarks/reach.py [--quick] [--rounds N] [--tokens N] [--threads N] [--only Q8_0,F16,Q4_K_M]

Probe and decode take turns, so that each share is of the bandwidth that this very minute had to give.
The figure by hand knows nothing of cpuchat's own arithmetic: tensors as the `gguf` package lists them, the KV cache
from the header's numbers, tok/s from the clock of this process, and a probe made for this round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from common import WORK, MeasureError, Row, Target, arguments, machine, report, run_main, say
from models import model, words
from product import default_threads

from cpuchat.backend.local import LocalBackend
from cpuchat.config.settings import ChatSection, EngineSection, SamplingSection, Settings, SpeculationSection
from cpuchat.hardware.bandwidth.read_bandwidth import measure
from cpuchat.protocol.messages import Failed, GenerationFinished, TextDelta
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.session.conversation import Conversation
from cpuchat.telemetry.meter import Figures

PROMPT_TOKENS = 32
SHAPE = "1.5b"
QUANTIZATIONS = ("Q8_0", "F16", "Q4_K_M")


@dataclass(frozen=True)
class Decoded:
    """One answer: what the app shows, and tok/s by the clock of this process."""

    figures: Figures
    tok_s: float
    n_past: float


async def decode(conversation: Conversation, prompt: str) -> Decoded:
    """The answer to `prompt` in a chat of its own. Raises MeasureError."""
    points: list[tuple[float, int]] = []
    finished: GenerationFinished | None = None
    conversation.new_chat()
    async for event in conversation.send(prompt):
        if isinstance(event, TextDelta):
            points.append((event.at_ms, event.predicted_n))
        elif isinstance(event, GenerationFinished):
            finished = event
        elif isinstance(event, Failed):
            raise MeasureError(event.message)
    if finished is None or len(points) < 2:
        raise MeasureError("nothing was written")
    (start, first), (end, last) = points[0], points[-1]
    n_past = finished.timings.n_past - finished.timings.predicted_n / 2
    return Decoded(conversation.figures(), 1e3 * (last - first) / (end - start), n_past)


def bytes_by_hand(file: Path, n_past: float) -> float:
    """What a token reads: every tensor but an embedding table that is not the output matrix, and an f16 KV cache."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    names = {tensor.name for tensor in reader.tensors}
    total = sum(
        int(tensor.n_bytes)
        for tensor in reader.tensors
        if tensor.name != "token_embd.weight" or "output.weight" not in names
    )

    def number(key: str) -> int:
        field = reader.fields[f"{architecture}.{key}"]
        return int(field.parts[field.data[0]][0])

    field = reader.fields["general.architecture"]
    architecture = bytes(field.parts[field.data[0]]).decode()
    head = number("embedding_length") // number("attention.head_count")
    return total + n_past * number("block_count") * number("attention.head_count_kv") * 2 * head * 2


async def reach(quantization: str, rounds: int, n_tokens: int, n_threads: int) -> tuple[list[Row], str]:
    """Probe and decode in turn. The rows, and one sentence about what limits it."""
    file = model(SHAPE, quantization)
    conversation = _conversation(n_tokens, n_threads)
    shown: list[float] = []
    by_hand: list[float] = []
    read: list[float] = []
    peaks: list[float] = []
    limit = ""
    try:
        info = await _load(conversation, file)
        for number in range(rounds):
            peak = measure(info.cpus, rounds=3).bytes_per_s
            answer = await decode(conversation, words(PROMPT_TOKENS, number))
            roofline = answer.figures.roofline
            if roofline.utilization is None:
                raise MeasureError(roofline.why_missing("utilization"))
            needed = bytes_by_hand(file, answer.n_past) * answer.tok_s
            say(f"  round {number + 1}/{rounds} {quantization}: {needed / 1e9:.1f} of {peak / 1e9:.1f} GB/s")
            shown.append(100 * roofline.utilization)
            by_hand.append(100 * needed / info.peak_read)
            read.append(needed / 1e9)
            peaks.append(peak / 1e9)
            limit = roofline.limit or "not known"
    finally:
        await conversation.close()
    name = f"{SHAPE} {quantization}"
    share = statistics.median(a / b for a, b in zip(read, peaks, strict=True))
    rows = [
        Row(f"{name}: utilization as shown, by hand", "%", shown, by_hand, Target(0.99)),
        Row(f"{name}: the same, not above", "%", shown, by_hand, Target(1.01, at_least=False)),
        Row(f"{name}: read by decoding, probe beside it", "GB/s", read, peaks),
    ]
    remark = f"{name}: decoding reaches {100 * share:.0f} % of the measured peak; what takes most of a pass: {limit}"
    return rows, remark


def _conversation(n_tokens: int, n_threads: int) -> Conversation:
    """Plain decoding with a model that is calibrated all the same."""
    settings = Settings(
        engine=EngineSection(ctx=1024, threads=n_threads),
        speculation=SpeculationSection(drafters="free", draft_model="none"),
        sampling=SamplingSection(temperature=0.0, seed=1),
        chat=ChatSection(max_tokens=n_tokens),
    )
    conversation = Conversation(settings=settings, backend=LocalBackend(), store=None)
    conversation.drafting = "off"
    return conversation


async def _load(conversation: Conversation, file: Path) -> ModelInfo:
    async for event in conversation.load_model(file):
        if isinstance(event, Failed):
            raise MeasureError(f"{event.message} {event.hint}")
    info = conversation.model
    if info is None or not info.peak_read:
        raise MeasureError("the read bandwidth could not be measured")
    return info


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(QUANTIZATIONS), help="quantizations, with commas between them")
    parser.add_argument("--tokens", type=int, default=0, help="per answer (0: the script's choice)")
    parser.add_argument("--threads", type=int, default=0, help="0: cpuchat's choice")


def main() -> None:
    options = arguments(__doc__, _options)
    # What passes cost and how fast memory is are measured once and kept; not in the user's own folder.
    os.environ["CPUCHAT_CACHE_DIR"] = str(WORK / "cache")
    where = machine()
    rounds, tokens = (1, 16) if options.quick else (options.rounds or 7, options.tokens or 96)
    rows: list[Row] = []
    remarks: list[str] = []
    for quantization in options.only.split(","):
        more, remark = asyncio.run(reach(quantization, rounds, tokens, options.threads or default_threads()))
        rows += more
        remarks.append(remark)
    report("reach", where, rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
