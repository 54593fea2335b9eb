"""What the agreement of two answers costs, and its figures against those of `cpuchat quality` on the same tokens.

    python benchmarks/agreement.py [--quick] [--rounds 3] [--a FILE --b FILE] [--tokens 500]

Time: from the end of both answers until the agreement is known, against one prefill of the same number of tokens behind
as long a prompt on each side, in turn (a shared beginning counts once: it is read once). Figures: the process of
`cpuchat quality` scores the answer's tokens with both files, in passes of the same length; what longer passes round
otherwise is told beside it. The pair is a Q4_K_M file and a Q8_0 made from it with
`cpuchat models quantize --allow-requantize`; --quick takes the demo's two files.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import sys
from contextlib import closing
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import psutil
from common import WORK, MeasureError, Row, Target, arguments, machine, report, run_main

from cpuchat.backend.local import LocalBackend
from cpuchat.base.line_process import LineOutput
from cpuchat.base.paths import demo_dir
from cpuchat.base.text import common_prefix
from cpuchat.compare.agreement import rows_of_block
from cpuchat.compare.comparison import Comparison
from cpuchat.compare.runner import Round, Side, SideAnswer
from cpuchat.config.settings import Settings
from cpuchat.engine.lockstep import Lockstep, Window
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.models.gguf.header import read_model
from cpuchat.protocol.messages import Failed, Measure
from cpuchat.quality.measure import scores_of
from cpuchat.quality.messages import Answer, QualityStart, Scored
from cpuchat.quality.statistics import Summary, summarize

PROMPT = "Write an LRU cache in Python with unit tests, and explain every part of it in detail."
TIME = Target(1.2, at_least=False)
SAME = Target(5e-5, at_least=False)
MODELS = WORK / "models"
PAIR = tuple(MODELS / f"qwen2.5-coder-1.5b-instruct-{kind}.gguf" for kind in ("q8_0-from-q4", "q4_k_m"))
DEMO = tuple(demo_dir() / f"cpuchat-demo-8m-{kind}.gguf" for kind in ("q8_0", "q4_k_m"))


class Written(Window):
    """The tokens of an answer, which are scored, behind its prompt."""

    n_prompt = 0

    @property
    def first(self) -> int:
        return self.n_prompt - 1


def quality(base: Path, other: Path, answer: SideAnswer, rows: int = 0) -> Summary:
    """Score an answer as `cpuchat quality` scores a window; `rows` tokens in a pass (0: as many as it takes)."""
    cpus = place(read_topology(), PlacementSpec()).cpus
    stream, start = io.BytesIO(), QualityStart(base=str(base), others=(str(other),), cpus=cpus, texts=(), n_ctx=2048)
    Written.n_prompt = len(answer.prompt_tokens)
    window = Written("answer", [*answer.prompt_tokens, *answer.tokens])
    with closing(Lockstep(start, LineOutput(stream))) as lockstep:
        lockstep._base = lockstep._load(str(base))
        lockstep._rows = rows or lockstep._rows
        lockstep._others.append(lockstep._load(str(other)))
        lockstep._compare(lockstep._base, [(0, lockstep._others[0])], 0, window)
    lines = (msgspec.json.decode(line, type=Answer) for line in stream.getvalue().splitlines())
    return summarize([scores_of(one) for one in lines if isinstance(one, Scored)])


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a worker, which tells on a busy machine too."""
    times = process.cpu_times()
    return times.user + times.system


async def prefill(comparison: Comparison, side: int, n_prompt: int, n: int) -> tuple[float, float]:
    """Return the seconds that a side takes for `n` tokens behind `n_prompt`, and its CPU time."""
    backend = comparison.runners[side].conversation.backend
    assert isinstance(backend, LocalBackend)
    process = psutil.Process(backend.pid)
    await backend.measure(Measure(depth=n_prompt, n_prompt=1))  # evaluates what comes before
    used = cpu_seconds(process)
    found = await backend.measure(Measure(depth=n_prompt, n_prompt=n))
    if isinstance(found, Failed):
        raise MeasureError(found.message)
    return found.seconds, cpu_seconds(process) - used


async def measure(files: tuple[Path, ...], n_tokens: int, rounds: int) -> tuple[Round, list[Row], str]:
    settings = Settings()
    settings.chat.max_tokens, settings.hardware.probe = n_tokens, False
    sides = Side.of(files[0]), Side.of(files[1])
    comparison = Comparison(sides, settings)
    totals, prefills, memory = [], [], 0
    cpu: tuple[list[float], list[float]] = [], []
    try:
        done = await comparison.ask(PROMPT)
        if failed := next((one.failed for one in done.answers if one.failed is not None), None):
            raise MeasureError(f"{failed.message} {failed.hint}")
        a, b = done.answers
        texts = [(*one.prompt_tokens, *one.tokens) for one in done.answers]
        n = len(a.tokens) + len(b.tokens) - max(common_prefix(*texts) - len(a.prompt_tokens), 0)
        workers = [psutil.Process(runner.conversation.backend.pid) for runner in comparison.runners]
        before = [one.memory_info().rss for one in workers]

        def watch(share: float) -> None:
            nonlocal memory
            grown = sum(one.memory_info().rss - old for one, old in zip(workers, before, strict=True))
            memory = max(memory, grown)

        for _ in range(rounds):
            started, used = perf_counter(), sum(map(cpu_seconds, workers))
            assert await comparison.agree(watch) is not None
            totals.append(perf_counter() - started)
            cpu[0].append(sum(map(cpu_seconds, workers)) - used)
            alone = [await prefill(comparison, side, len(a.prompt_tokens), n) for side in (0, 1)]
            prefills.append(sum(seconds for seconds, _ in alone))
            cpu[1].append(sum(seconds for _, seconds in alone))
            print(
                f"{totals[-1]:.2f} s, prefills {prefills[-1]:.2f} s; CPU time {cpu[0][-1]:.2f} s, {cpu[1][-1]:.2f} s",
                file=sys.stderr,
                flush=True,
            )
    finally:
        await comparison.close()
    rows = [
        Row(f"agreement, {n} tokens read by each side", "s", totals, prefills, TIME),
        Row("its CPU time", "s", *cpu, TIME),
        Row("both workers grow by", "MB", [memory / 1e6]),
    ]
    return done, rows, f"answers of {len(a.tokens)} and {len(b.tokens)} tokens"


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--a", type=Path, default=PAIR[0])
        parser.add_argument("--b", type=Path, default=PAIR[1])
        parser.add_argument("--tokens", type=int, default=500, help="tokens of each answer, at most")

    options = arguments(__doc__, more)
    where, files = machine(), DEMO if options.quick else (options.a, options.b)
    n_tokens, rounds = (40, 1) if options.quick else (options.tokens, options.rounds or 3)
    done, rows, remark = asyncio.run(measure(files, n_tokens, rounds))
    assert done.agreement is not None
    for writer, own in enumerate(done.agreement.answers):
        pair = files[writer], files[1 - writer]
        expected = quality(*pair, done.answers[writer], rows_of_block(read_model(files[0]).n_vocab))
        longer = quality(*pair, done.answers[writer])
        name = f"answer of {'AB'[writer]}"
        for what, value, other, rounded in (
            ("same next token", own.same_top, expected.same_top.value, longer.same_top.value),
            ("KLD mean", own.kld, expected.kld.value, longer.kld.value),
            ("PPL", own.ppl, expected.ppl_base, longer.ppl_base),
            ("PPL of the other", own.ppl_other, expected.ppl_other, longer.ppl_other),
        ):
            note = f"agreement {value:.5f}, quality {other:.5f}, quality in longer passes {rounded:.5f}"
            rows.append(Row(f"{name}, {what}: off by", "", [abs(value - other)], target=SAME, note=note))
    report("agreement", where, rows, quick=options.quick, remarks=[remark])


if __name__ == "__main__":
    run_main(main)
