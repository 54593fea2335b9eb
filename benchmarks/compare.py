"""What comparing costs: memory of two workers that map the same file, and decoding while the compare screen shows it.

    python benchmarks/compare.py [--quick] [--rounds 5] [--only memory,screen]

Memory: two sides of one file against one worker of it; what the second adds must be its KV cache, its buffers and 60 MB
for the process, as the weights are mapped once. Screen: decode tok/s of the side that writes on the compare screen
(120×40) with the same file and prompt on the chat screen.

The model is one of benchmarks/models.py (0.5B shape, Q4_K_M), which never ends by itself; with --quick it is the demo
model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import models
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main

from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.chats.store import ChatStore
from cpuchat.compare.comparison import Comparison
from cpuchat.compare.runner import Round, Side
from cpuchat.config.settings import Settings
from cpuchat.models.fit import required_memory
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.library import Library
from cpuchat.session.conversation import Conversation

SIZE = (120, 40)
PROMPT = "Why does a CPU write slower than it reads the prompt?"
PROCESS_ALLOWANCE = 60e6
PARTS = ("memory", "screen")


def settings(n_tokens: int) -> Settings:
    chosen = Settings()
    chosen.sampling.temperature = 0.0
    chosen.speculation.drafters = "off"
    chosen.chat.max_tokens = n_tokens
    return chosen


async def one_round(file: Path, n_tokens: int) -> tuple[Round, Comparison]:
    """Two sides of the same file."""
    comparison = Comparison((Side.of(file), Side.of(file)), settings(n_tokens))
    try:
        done = await comparison.ask(PROMPT)
    finally:
        await comparison.close()
    if not done.complete:
        failed = next((answer.failed for answer in done.answers if answer.failed is not None), None)
        raise MeasureError(failed.message if failed is not None else "a side did not finish")
    return done, comparison


def memory_over_one(file: Path, n_tokens: int) -> dict[str, float]:
    """MB that the second worker adds, and what it may add: its KV cache and buffers by the header, and 60 MB."""
    done, comparison = asyncio.run(one_round(file, n_tokens))
    a, model = done.answers[0].memory, done.answers[1].model
    if done.memory is None or a is None or model is None:
        raise MeasureError("the memory of the workers cannot be read")
    options = comparison.runners[1].settings.load_options()
    need = required_memory(read_model(file), options, model.n_ctx)
    allowed = need.kv + need.repack + need.compute + PROCESS_ALLOWANCE
    return {"added": (done.memory.total - a.total) / 1e6, "allowed": allowed / 1e6}


@asynccontextmanager
async def app(file: Path, n_tokens: int) -> AsyncIterator[tuple[Any, Any]]:
    """The app with the model loaded, on a screen that nobody sees."""
    from cpuchat.tui.app import ChatApp

    conversation = Conversation(settings=settings(n_tokens), backend=LocalBackend(), store=ChatStore(paths.chats_db()))
    running = ChatApp(conversation, Library([]), file)
    async with running.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: conversation.model is not None and not running.chat_screen.busy)
        yield running, pilot


async def until(pilot: Any, condition: Callable[[], object]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await pilot.pause(0.1)


async def on_chat_screen(file: Path, n_tokens: int) -> float:
    async with app(file, n_tokens) as (running, pilot):
        running.chat_screen.submit(PROMPT)
        messages = lambda: running.conversation.messages  # noqa: E731
        await until(pilot, lambda: len(messages()) == 2 and messages()[-1].timings is not None)
        return messages()[-1].timings.predicted_per_second or 0.0


async def on_compare_screen(file: Path, n_tokens: int) -> float:
    """Decode tok/s of the first side."""
    async with app(file, n_tokens) as (running, pilot):
        running.chat_screen.compare((Side.of(file), Side.of(file)), PROMPT)
        await until(pilot, lambda: running.screen.has_class("-measured") and not running.screen.busy)
        timings = running.screen.comparison.turns[0].rounds[0].answers[0].timings
        return (timings.predicted_per_second or 0.0) if timings is not None else 0.0


def measure(part: str, file: Path, n_tokens: int, rounds: int) -> Row:
    if part == "memory":
        found = [memory_over_one(file, n_tokens) for _ in range(rounds)]
        added, allowed = ([one[name] for one in found] for name in ("added", "allowed"))
        return Row("second worker of the same file, of KV + buffers + 60 MB", "MB", added, allowed, Target(1, False))
    screens = {
        "chat": lambda: asyncio.run(on_chat_screen(file, n_tokens)),
        "compare": lambda: asyncio.run(on_compare_screen(file, n_tokens)),
    }
    runs = alternate(rounds, screens)
    return Row("decode on the compare screen, of the chat screen", "tok/s", runs["compare"], runs["chat"], Target(0.98))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(PARTS), help="memory,screen")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    rounds = options.rounds or (1 if options.quick else 5)
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as home:
        for kind in ("CONFIG", "DATA", "CACHE"):
            os.environ[f"CPUCHAT_{kind}_DIR"] = str(Path(home) / kind.lower())
        file = Library([]).resolve("demo") if options.quick else models.model("0.5b", "Q4_K_M")
        rows = [measure(part, file, 48 if options.quick else 192, rounds) for part in options.only.split(",")]
    report("compare", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
