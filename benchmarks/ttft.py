"""Time to the first token with a history of 2,000 tokens, and with a very long one.

    python benchmarks/ttft.py [--quick] [--rounds N] [--model 0.5b:Q4_K_M] [--threads N]

Second turn: the history is in the KV cache, some new tokens come on top. cpuchat (worker, seen from this process)
against llama-server with its prompt cache (streamed over HTTP, seen from this process): same file, same threads, the
same prompts; both must report the same number of tokens evaluated. After a restart: a new worker that finds the
chat's saved KV, against a new worker that finds none. Index: from the end of the prefill to the first token, after
131,072 tokens, in which suffix decoding looks for repetitions, against the same without drafters; the model is a tiny
one with a recurrent state, which reads so much in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import models
from baselines import LlamaServer, llama_server
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say
from product import GREEDY, Answer, answer, default_threads, worker

from cpuchat.backend.local import LocalBackend
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import Generate, LoadOptions, PrefillProgress, Speculation, TextDelta
from tests.support.tiny_gguf import write_tiny_gguf

HISTORY, NEW, FIRST_ANSWER, SHORT = 2000, 32, 16, 4
N_CTX = 4096
CHAT = "benchmark"


def _second_turn(first_prompt: str, first_answer: str, salt: int) -> str:
    return first_prompt + first_answer + models.words(NEW, salt=100 + salt)


def _server_side(server: LlamaServer, prompt: str, evaluated: list[int]) -> Callable[[], float]:
    first = server.complete(prompt, FIRST_ANSWER)

    def second_turn() -> float:
        done = server.complete(_second_turn(prompt, first.text, len(evaluated)), SHORT)
        evaluated.append(done.prompt_n)
        return done.first_ms

    return second_turn


async def _our_side(backend: LocalBackend, prompt: str, first: str, number: int, evaluated: list[int]) -> float:
    done = await answer(backend, _second_turn(prompt, first, number), SHORT)
    evaluated.append(done.timings.prompt_n)
    return done.first_ms


def second_turn(file: Path, threads: int, rounds: int, history: int) -> Row:
    """Both sides stay up for the whole comparison; every round evaluates other new tokens on the same history."""
    prompt = models.words(history, salt=1)
    ours_evaluated: list[int] = []
    theirs_evaluated: list[int] = []
    with (
        tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder,
        asyncio.Runner() as runner,
        llama_server(file, threads=threads, n_ctx=N_CTX, log=Path(folder) / "server.log") as server,
    ):
        context = worker(file, LoadOptions(n_ctx=N_CTX), PlacementSpec(threads=threads))
        backend = runner.run(context.__aenter__())
        try:
            first = runner.run(answer(backend, prompt, FIRST_ANSWER))
            theirs = _server_side(server, prompt, theirs_evaluated)

            def ours() -> float:
                return runner.run(_our_side(backend, prompt, first.text, len(ours_evaluated), ours_evaluated))

            # The first turn of either side also evaluates the last token of the first answer: not counted.
            say(f"  not counted: llama-server {theirs():.0f} ms, cpuchat {ours():.0f} ms")
            runs = alternate(rounds, {"llama-server": theirs, "cpuchat": ours}, settle=0.5)
        finally:
            runner.run(context.__aexit__(None, None, None))
    counts = ours_evaluated[1:], theirs_evaluated[1:]
    note = f"evaluated tokens per turn: cpuchat {_range(counts[0])}, llama-server {_range(counts[1])}"
    if set(counts[0]) != set(counts[1]):
        note += " - NOT THE SAME WORK"
    return Row(
        f"second turn, {history} tokens of history",
        "ms",
        runs["cpuchat"],
        runs["llama-server"],
        Target(1.1, False),
        note,
    )


def _range(counts: list[int]) -> str:
    return str(counts[0]) if min(counts) == max(counts) else f"{min(counts)}–{max(counts)}"


async def _fresh(file: Path, threads: int, prompt: str, tokens: int, state: Path) -> Answer:
    """A new worker that keeps its KV in `state`; one answer of the chat; ended (and saved) after it."""
    async with worker(file, LoadOptions(n_ctx=N_CTX), PlacementSpec(threads=threads), state_dir=state) as backend:
        return await answer(backend, prompt, tokens, chat_id=CHAT)


def restart(file: Path, threads: int, rounds: int, history: int) -> Row:
    """First answer of a new worker: with the chat's saved KV, and without."""
    prompt = models.words(history, salt=2)
    seen: dict[str, Answer] = {}
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder:
        saved = Path(folder) / "saved"
        first = asyncio.run(_fresh(file, threads, prompt, FIRST_ANSWER, saved))
        if not any(saved.rglob("*")):
            raise MeasureError("the worker saved no KV")

        def start(name: str, keep: bool) -> float:
            state = Path(folder) / name
            shutil.rmtree(state, ignore_errors=True)
            if keep:
                shutil.copytree(saved, state)
            turn = _second_turn(prompt, first.text, 0)
            seen[name] = asyncio.run(_fresh(file, threads, turn, SHORT, state))
            return seen[name].first_ms

        sides = {"cold": lambda: start("cold", keep=False), "saved KV": lambda: start("saved KV", keep=True)}
        runs = alternate(rounds, sides)
    warm, cold = seen["saved KV"].timings, seen["cold"].timings
    note = (
        f"with saved KV {warm.cache_n} tokens reused and {warm.prompt_n} evaluated, "
        f"cold {cold.prompt_n} evaluated; loading the model is not in it"
    )
    return Row(
        f"first turn after a restart, {history} tokens", "ms", runs["saved KV"], runs["cold"], Target(0.15, False), note
    )


async def _after_prefill(backend: LocalBackend, prompt: str, *, drafts: bool) -> tuple[float, str]:
    """ms from the end of the prefill to the first text, and the text."""
    speculation = Speculation(drafters=("suffix",), depth=4) if drafts else Speculation()
    request = Generate(prompt=prompt, sampling=GREEDY, max_tokens=FIRST_ANSWER, speculation=speculation)
    evaluated = first = 0.0
    text = ""
    async for event in backend.generate(request):
        now = time.perf_counter()
        if isinstance(event, PrefillProgress):
            evaluated = now
        elif isinstance(event, TextDelta):
            first, text = first or now, text + event.text
    return 1e3 * (first - evaluated), text


def index(rounds: int, n_tokens: int) -> list[Row]:
    """A long prompt that is evaluated, and one that is in the KV cache while its index is not there."""
    rng = random.Random(1)
    runs: dict[str, dict[bool, list[float]]] = {"evaluated": {}, "cached": {}}

    async def one(backend: LocalBackend, drafts: bool) -> None:
        for kind, found in runs.items():
            prompt = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ .,;", k=n_tokens))
            if kind == "cached":
                prompt += (await _after_prefill(backend, prompt, drafts=False))[1] + "."
            found.setdefault(drafts, []).append((await _after_prefill(backend, prompt, drafts=drafts))[0])

    async def all_rounds(file: Path) -> None:
        async with worker(file, LoadOptions(n_ctx=n_tokens + 4096)) as backend:
            for number in range(rounds):
                say(f"  round {number + 1}/{rounds}")
                for drafts in (False, True):
                    await one(backend, drafts)

    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder:
        file = write_tiny_gguf(Path(folder) / "mamba.gguf", arch="mamba", n_ctx_train=1 << 18, likely="XYZ")
        asyncio.run(all_rounds(file))
    what = f"end of the prefill to the first token, {n_tokens:,} tokens"
    return [
        Row(f"{what} {kind}", "ms", found[True], found[False], note="the baseline drafts nothing")
        for kind, found in runs.items()
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="0.5b:Q4_K_M")
    parser.add_argument("--threads", type=int, default=0, help="for both sides (0: cpuchat's choice)")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    file = models.model(*options.model.split(":"))
    threads = options.threads or default_threads()
    history = 300 if options.quick else HISTORY
    say(f"{file.name}, {threads} threads")
    rows = [
        second_turn(file, threads, options.rounds or (2 if options.quick else 9), history),
        restart(file, threads, options.rounds or (1 if options.quick else 3), history),
        *index(options.rounds or (1 if options.quick else 5), 1 << (13 if options.quick else 17)),
    ]
    remarks = [f"{file.name}, {threads} threads; the baseline of the restart is cpuchat itself without saved KV"]
    report("ttft", where, rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
