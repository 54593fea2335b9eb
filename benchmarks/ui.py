"""What the app costs while an answer streams: CPU of the UI process alone, in a real terminal (a pty of 120 by 40).

    python benchmarks/ui.py [--quick] [--rounds 3] [--rates 20,60] [--seconds 20] [--against CHECKOUT]

The whole app with its store, worker pipe and counters, after a chat of 10,000 tokens with the figures shown. The worker
computes nothing: it writes mixed Markdown at the given pace (`paced_worker.py`), but says that it uses every core, so
the app takes its slowest pace. Counted are CPU seconds, user and system, of the UI process with all its threads; so
other load on the machine changes little. `--against` runs the app of another checkout in turn.

About 4 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import itertools
import json
import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuchat.chats.records import Chat
    from cpuchat.chats.store import ChatStore

HERE = Path(__file__).parent
HISTORY = 10_000
TARGETS = {20.0: 2.0, 60.0: 5.0}
"""% of a core by tok/s."""


def paced_chat(store: ChatStore, n_tokens: int) -> Chat:
    """Store a chat whose answers have about `n_tokens` tokens together."""
    from paced_worker import tokens

    chat = store.create_chat("Paced", title="How fast?")
    for _ in range(n_tokens // 500):
        store.add_message(chat.id, "user", "How fast could it be?")
        store.add_message(chat.id, "assistant", "".join(tokens(500)), model="Paced", stop_reason="end")
    return chat


def child(options: argparse.Namespace) -> None:
    """Run the app, write one line "start" and one of figures to the pipe."""
    sys.path.insert(0, str(options.root))

    from cpuchat.backend import process
    from cpuchat.backend.local import LocalBackend
    from cpuchat.base import paths
    from cpuchat.chats.store import ChatStore
    from cpuchat.config import settings
    from cpuchat.models.library.library import Library
    from cpuchat.session.conversation import Conversation
    from cpuchat.tui.app import ChatApp

    command = [sys.executable, str(HERE / "paced_worker.py"), str(options.root), str(options.rate)]
    process.python_command = lambda *_: command  # type: ignore[assignment]

    store = ChatStore(paths.chats_db())
    chat = paced_chat(store, options.history)
    pipe = options.pipe.open("w", buffering=1)

    painted = itertools.count()

    async def watch() -> None:
        screen = app.chat_screen
        await until(lambda: screen.conversation.model is not None and not screen.session.busy)
        await screen.session.open(chat.id)
        await until(lambda: len(screen.conversation.messages) >= options.history // 500 * 2)
        await until(lambda: screen._transcript.up_to_date)
        screen._composer.submit("How fast could it be?")
        await until(lambda: screen.conversation.figures().predicted_n > options.rate)
        print("start", file=pipe)
        profile = cProfile.Profile()
        if options.profile:
            profile.enable()
        before, paints = (time.perf_counter(), time.process_time(), time.thread_time()), next(painted)
        await asyncio.sleep(options.seconds)
        after = time.perf_counter(), time.process_time(), time.thread_time()
        if options.profile:
            profile.disable()
            profile.dump_stats(options.profile)
        wall, cpu, own = (now - then for now, then in zip(after, before, strict=True))
        result = {"cpu": 100 * cpu / wall, "threads": 100 * (cpu - own) / wall, "wall": wall}
        print(json.dumps({**result, "paints": (next(painted) - paints - 1) / wall}), file=pipe)
        app.action_leave()

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.05)

    ChatApp.post_display_hook = lambda self: next(painted)  # type: ignore[assignment, method-assign]
    ChatApp.on_ready = lambda self: self.run_worker(watch())  # type: ignore[attr-defined]
    conversation = Conversation(settings=settings.load(), backend=LocalBackend(), store=store)
    library = Library(())
    app = ChatApp(conversation, library, library.resolve("demo"))
    app.run()
    if app.crash is not None:
        print(app.crash.what)


def measure(options: argparse.Namespace, root: Path, rate: float) -> dict[str, float]:
    """One run in a pty of its own; adds KB per second to the child's figures."""
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder:
        fifo = Path(folder, "figures")
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return _measure(options, root, rate, Path(folder), reader)
        finally:
            os.close(reader)


def _measure(options: argparse.Namespace, root: Path, rate: float, folder: Path, reader: int) -> dict[str, float]:
    import pexpect
    from common import MeasureError
    from terminal import COLUMNS, LINES, environment

    args = [__file__, "--child", "--root", str(root), "--pipe", str(folder / "figures"), "--rate", str(rate)]
    args += ["--seconds", str(options.seconds), "--history", str(options.history), "--profile", options.profile]
    terminal = pexpect.spawn(
        sys.executable, args, dimensions=(LINES, COLUMNS), env=environment(folder), timeout=None, echo=False
    )
    written, counting, pending, last = 0, False, b"", b""
    result: dict[str, float] = {}
    while True:
        ready, _, _ = select.select([terminal.child_fd], [], [], 0.1)
        with contextlib.suppress(BlockingIOError):
            pending += os.read(reader, 65536)
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            counting = line == b"start"
            if not counting:
                result = json.loads(line)
        if terminal.child_fd in ready:
            try:
                last = os.read(terminal.child_fd, 65536)
            except OSError:  # Linux's way of telling that the other end is closed
                break
            written += len(last) * counting
    terminal.close()
    if not result:
        raise MeasureError(f"the app ended before it was measured: {last[-2000:]!r}")
    return {**result, "KB/s": written / 1000 / result["wall"]}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", default="20,60", help="tokens per second")
    parser.add_argument("--seconds", type=float, default=0, help="of each run (0: 20, quick 5)")
    parser.add_argument("--history", type=int, default=HISTORY, help="tokens already in the chat")
    parser.add_argument("--against", type=Path, help="another checkout of cpuchat, measured in turn")
    parser.add_argument("--profile", default="", help="write a cProfile of the event loop here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, default=HERE.parent, help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)


def main() -> None:
    from common import Row, Target, alternate, arguments, machine, report

    options = arguments(__doc__, _options)
    if options.child:
        child(options)
        return
    where = machine()
    options.seconds = options.seconds or (5 if options.quick else 20)
    rounds = options.rounds or (1 if options.quick else 3)
    roots = {"cpuchat": HERE.parent, **({"other": options.against.resolve()} if options.against else {})}
    rows: list[Row] = []
    remarks: list[str] = []
    for rate in map(float, options.rates.split(",")):
        runs = alternate(
            rounds, {name: lambda root=root, rate=rate: measure(options, root, rate) for name, root in roots.items()}
        )
        values = {name: [run["cpu"] for run in runs[name]] for name in runs}
        target = Target(TARGETS[rate], at_least=False) if rate in TARGETS and len(roots) == 1 else None
        rows.append(
            Row(f"UI process at {rate:g} tok/s", "% of a core", values["cpuchat"], values.get("other", ()), target)
        )
        for name in runs:
            middle = {key: statistics.median(run[key] for run in runs[name]) for key in ("threads", "paints", "KB/s")}
            remarks.append(
                f"{rate:g} tok/s, {name}: {middle['threads']:.2f} % of a core in threads beside the event loop, "
                f"{middle['paints']:.1f} paints/s, {middle['KB/s']:.1f} KB/s to the terminal"
            )
    report("ui", where, rows, quick=options.quick or bool(options.against), remarks=remarks)


if __name__ == "__main__":
    main()
