"""Measure how long it takes to open a long chat, to scroll through it, and to search in many chats.

    python benchmarks/chats.py [--quick] [--rounds 5]

The whole app, headless at 120 by 40, on a file with one chat of 5,000 messages (2 MB), every tenth answer regenerated,
and 1,000 chats of 50 messages. "Open" ends when the last screen of the chat can be painted, "rendered" when all of it
can. A frame is one pass of the event loop: while the chat is opened and rendered, while it is scrolled through in
pages, and while it is shown from a message in its middle that a search found, with n pressed 20 times. Watching frames
keeps the event loop running, which an app at rest does not, and takes time from the thread that reads the chat; so the
times to open are those of another start of the app, without.
Search is the store's. Wall times want an idle machine; the CPU times beside them (of the process, for frames of the
event loop's thread) do not.

About 4 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

from common import Row, Target, arguments, machine, report, run_main

HERE = Path(__file__).parent
WORDS = (HERE.parent / "README.md").read_text().split()
SEARCHES = {
    "words of one message": "zyzzyva quagga",
    "a word of 5 % of the messages": "pangolin",
    "a word of all messages": "shared",
    "the first letter of a word": "s",
    "a part of a word": "yzzyv",
    "a string that occurs nowhere": "xqzxqz",
}


def fill(path: Path, n_long: int, n_chats: int) -> str:
    """Write the chats; returns the id of the long one."""
    from cpuchat.chats.store import ChatStore
    from cpuchat.protocol.timings import Timings

    words = random.Random(1)
    store = ChatStore(path)
    timings = Timings(prompt_n=40, prompt_ms=160.0, predicted_n=80, predicted_ms=2000.0, ttft_ms=200.0, n_past=900)

    def text(n: int) -> str:
        extra = " pangolin" if words.random() < 0.05 else ""
        return "shared " + " ".join(words.choices(WORDS, k=n)) + extra

    def converse(title: str, n: int, regenerated: int) -> str:
        chat = store.create_chat("Model", title=title)
        for number in range(n // 2):
            question = store.add_message(chat.id, "user", text(20)).id
            for _ in range(2 if regenerated and number % regenerated == 0 else 1):
                store.add_message(
                    chat.id, "assistant", text(100), after=question, model="Model", stop_reason="end", timings=timings
                )
        return chat.id

    with store.transaction():
        for number in range(n_chats):
            converse(f"Chat {number}", 50, 0)
        long = converse("Long", n_long, 10)
        rare = store.create_chat("Model", title="Rare")
        store.add_message(rare.id, "user", "A quagga and a zyzzyva.")
    store.close()
    return long


def timed_search(store: object, text: str) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    store.search(text)  # type: ignore[attr-defined]
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


async def timed_opening(path: Path, chat_id: str, *, watched: bool) -> dict[str, float]:
    """Open the chat in a new app; returns times in ms: of its frames (`watched`), or of what it takes."""
    from cpuchat.backend.local import LocalBackend
    from cpuchat.chats.store import ChatStore, Matcher
    from cpuchat.config.settings import Settings
    from cpuchat.models.library.library import Library
    from cpuchat.session.conversation import Conversation
    from cpuchat.tui.app import ChatApp

    conversation = Conversation(settings=Settings(), backend=LocalBackend(), store=ChatStore(path))
    app = ChatApp(conversation, Library(()), None)
    times: dict[str, float] = {}
    worst = [0.0, 0.0]

    async def watch_frames() -> None:
        before = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter(), time.thread_time()
            worst[:] = (max(known, 1e3 * (end - start)) for known, start, end in zip(worst, before, now, strict=True))
            before = now

    def longest(what: str) -> None:
        times[f"longest frame {what}"], times[f"longest frame {what}, CPU"] = worst
        worst[:] = 0.0, 0.0

    async with app.run_test(size=(120, 40)) as pilot:
        screen = app.chat_screen
        await pilot.pause()
        transcript = screen._transcript
        watch = asyncio.create_task(watch_frames()) if watched else None
        await asyncio.sleep(0)
        start, cpu = time.perf_counter(), time.process_time()
        screen.open_chat(chat_id)
        while not transcript._entries or not transcript._entries[-1].lines:
            await asyncio.sleep(0.001)
        times["open"] = 1e3 * (time.perf_counter() - start)
        times["open, CPU"] = 1e3 * (time.process_time() - cpu)
        longest("while opening")
        while not transcript.up_to_date:
            await asyncio.sleep(0.005)
        times["rendered"] = 1e3 * (time.perf_counter() - start)
        longest("while rendering")
        for _ in range(100):
            transcript.scroll_pages(-1)
            await asyncio.sleep(0.01)
        longest("while scrolling")
        middle = screen.conversation.messages[len(screen.conversation.messages) // 2]
        before, start = transcript._entries, time.perf_counter()
        screen.open_chat(chat_id, middle.id, Matcher("shared"))
        while transcript._entries is before or not transcript.up_to_date:
            await asyncio.sleep(0.005)
        times["match shown, rendered"] = 1e3 * (time.perf_counter() - start)
        for _ in range(20):
            transcript.action_hit(1)
            await asyncio.sleep(0.01)
        longest("while showing matches")
        if watch is not None:
            watch.cancel()
        await app.action_quit()
    return {name: took for name, took in times.items() if name.startswith("longest frame") == watched}


def measure(options: argparse.Namespace) -> None:
    from cpuchat.chats.store import ChatStore

    where = machine()
    rounds = options.rounds or (2 if options.quick else 5)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder:
        os.environ |= {f"CPUCHAT_{name}_DIR": f"{folder}/{name.lower()}" for name in ("DATA", "CACHE", "CONFIG")}
        path = Path(folder, "chats.db")
        long = fill(path, 500 if options.quick else 5000, 100 if options.quick else 1000)
        with sqlite3.connect(path) as db:
            n, size = db.execute("SELECT count(*), sum(length(content)) FROM messages").fetchone()
        openings = [
            asyncio.run(timed_opening(path, long, watched=False)) | asyncio.run(timed_opening(path, long, watched=True))
            for _ in range(rounds)
        ]
        frame = Target(50, at_least=False)
        targets = {"open": Target(500, at_least=False)}
        moments = ("opening", "rendering", "scrolling", "showing matches")
        targets |= {f"longest frame while {moment}": frame for moment in moments}
        for name in openings[0]:
            rows.append(Row(name, "ms", [times[name] for times in openings], target=targets.get(name)))
        store = ChatStore(path)
        for name, text in SEARCHES.items():
            runs = [timed_search(store, text) for _ in range(2 * rounds)]
            rows.append(
                Row(f"search: {name}", "ms", [wall for wall, _ in runs], target=Target(50, at_least=False),
                    note=f"CPU {statistics.median(cpu for _, cpu in runs):.1f} ms")
            )  # fmt: skip
        store.close()
    report("chats", where, rows, quick=options.quick, remarks=[f"{n:,} messages, {size / 1e6:.1f} MB of text"])


def main() -> None:
    measure(arguments(__doc__))


if __name__ == "__main__":
    run_main(main)
