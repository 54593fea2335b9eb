"""However the app ends: the terminal is given back, no traceback is shown, the chat is kept, the worker goes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from cpuchat.base import paths
from cpuchat.config import settings
from tests.e2e.test_app import QUICK, ask, stored
from tests.support.remote_server import Reply, remote_server
from tests.support.terminal import Terminal

BREAKING = (sys.executable, "-m", "tests.support.breaking_app")
# Alternate screen, mouse, bracketed paste, focus reports and the keyboard protocol off; line wrap and cursor on.
MODES = [("?1049h", "?1049l"), ("?1000h", "?1000l"), ("?1003h", "?1003l"), ("?2004h", "?2004l"), ("?1004h", "?1004l"),
         (">", "<u"), ("?7l", "?7h"), ("?25l", "?25h")]  # fmt: skip


EVERYWHERE = ("handler", "worker", "thread", "render", "styles")
"""And in a callback, which another test breaks in."""


@contextlib.contextmanager
def opened(*arguments: str | Path, home: Path, **terminal_is: Any) -> Iterator[Terminal]:
    settings.update(QUICK)
    size = {"columns": 100, "rows": 30}
    words = [str(argument) for argument in arguments]
    with contextlib.closing(Terminal(words, home=home, **{**size, **terminal_is})) as terminal:
        yield terminal


def family(terminal: Terminal) -> list[psutil.Process]:
    app = psutil.Process(terminal.pid)
    return [app, *app.children(recursive=True)]


def check_given_back(terminal: Terminal) -> None:
    """Assert that the program has ended and its terminal is restored."""
    raw = bytes(terminal.raw)
    for on, off in MODES:
        assert raw.rfind(f"\x1b[{off}".encode()) > raw.rfind(f"\x1b[{on}".encode()), off
    assert b"Traceback" not in raw
    assert terminal.last_modes == terminal.first_modes


def check_kept(members: list[psutil.Process]) -> None:
    """Assert that all of them end, and that the answer is kept as far as it was."""
    assert not psutil.wait_procs(members, timeout=180)[1]
    (_, answer) = stored()
    assert answer[1] and answer[2] == "cancelled"


def last_lines(terminal: Terminal) -> str:
    """Return what is shown after the alternate screen was left."""
    return bytes(terminal.raw).rpartition(b"\x1b[?1049l")[2].decode()


def break_in(terminal: Terminal, where: str) -> None:
    terminal.type(f"break {where}")
    terminal.wait_for(f"break {where}")
    terminal.press("enter")


@contextlib.contextmanager
def answering(text: str) -> Iterator[str]:
    """Serve a model whose answer is `text` and does not end; yields its address."""
    urls: queue.Queue[tuple[str, Callable[[], object]]] = queue.Queue()

    async def answer(reply: Reply) -> None:
        await reply.head()
        for at in range(0, len(text), 1000):
            await reply.text(text[at : at + 1000])
        await reply.until_left()

    async def serve() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        async with remote_server(answer=answer) as server:
            urls.put((server.url, lambda: loop.call_soon_threadsafe(ended.set)))
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    url, end = urls.get()
    try:
        yield url
    finally:
        end()
        thread.join()


def test_an_error_anywhere_is_one_line(tmp_path: Path) -> None:
    with answering("An answer.") as url:
        for where in EVERYWHERE:
            with opened("--server", url, home=tmp_path, command=BREAKING) as terminal:
                terminal.wait_for("Enter sends")
                break_in(terminal, where)
                assert terminal.wait_for_end() == 1
                check_given_back(terminal)
                told = last_lines(terminal)
                assert "cpuchat: internal error (" in told and "Your chat is saved. Log:" in told
                assert "Fault: made by a test" in told or where == "styles"
    assert "made by a test" in sorted(paths.log_dir().glob("app-*.log"))[0].read_text()


def test_what_was_being_written_and_typed_survives_an_error(tiny_model: Path, tmp_path: Path) -> None:
    with opened("--model", tiny_model, home=tmp_path, command=BREAKING) as terminal:
        terminal.wait_for("tiny F32")
        ask(terminal, "say something long")
        terminal.type("half a thought")
        terminal.wait_for("half a thought")
        members = family(terminal)
        os.kill(terminal.pid, signal.SIGUSR1)  # a fault in a callback, see breaking_app
        assert terminal.wait_for_end() == 1
        check_kept(members)
    with opened("--model", tiny_model, home=tmp_path) as terminal:
        terminal.wait_for("half a thought")
        terminal.wait_for("say something long")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0


def test_an_error_while_leaving_is_one_line(tmp_path: Path) -> None:
    with answering("An answer.") as url, opened("--server", url, home=tmp_path, command=BREAKING) as terminal:
        terminal.wait_for("Enter sends")
        break_in(terminal, "leaving")
        terminal.wait_for("fails when left")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 1
        check_given_back(terminal)
        assert "Fault: made by a test" in last_lines(terminal)


def test_a_signal_while_streaming_ends_in_order(tiny_model: Path, tmp_path: Path) -> None:
    """SIGTERM; each of the others is sent in a test below."""
    with opened("--model", tiny_model, home=tmp_path) as terminal:
        terminal.wait_for("tiny F32")
        ask(terminal, "say something long")
        members = family(terminal)
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.wait_for_end() == 128 + signal.SIGTERM
        check_given_back(terminal)
        assert "cpuchat: killed by SIGTERM. Your chat is saved." in last_lines(terminal)
        check_kept(members)


def test_a_signal_during_the_start_ends_in_order(tiny_model: Path, tmp_path: Path) -> None:
    with opened("--model", tiny_model, home=tmp_path) as terminal:
        terminal.wait_until(lambda _: b"\x1b[?1049h" in terminal.raw, "the alternate screen")
        os.kill(terminal.pid, signal.SIGINT)
        assert terminal.wait_for_end() == 128 + signal.SIGINT
        check_given_back(terminal)


def test_a_second_signal_ends_an_app_that_is_stuck(tiny_model: Path, tmp_path: Path) -> None:
    with opened("--model", tiny_model, home=tmp_path, command=BREAKING) as terminal:
        terminal.wait_for("tiny F32")
        break_in(terminal, "loop")
        terminal.wait_for("stuck now")
        members = family(terminal)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(terminal.pid, number)
        # Which of two signals at once comes second is the kernel's choice.
        assert terminal.wait_for_end() in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        check_given_back(terminal)
        assert not psutil.wait_procs(members, timeout=180)[1]


def test_an_app_whose_terminal_is_closed_keeps_the_chat_and_goes(tiny_model: Path, tmp_path: Path) -> None:
    with opened("--model", tiny_model, home=tmp_path) as terminal:
        terminal.wait_for("tiny F32")
        ask(terminal, "say something long")
        members = family(terminal)
        assert terminal.hang_up() == 128 + signal.SIGHUP
        check_kept(members)


def test_ctrl_z_stops_the_whole_job_and_fg_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    settings.update(QUICK)
    bash = ("bash", "--norc", "--noprofile", "-i")
    with contextlib.closing(Terminal([], columns=100, rows=30, home=tmp_path, command=bash)) as shell:
        shell.type(f"PS1='ready$ '; {sys.executable} -m cpuchat.cli.main --model {tiny_model}\r")
        shell.wait_for("tiny F32")
        ask(shell, "say something long")
        members = psutil.Process(shell.pid).children(recursive=True)
        assert len(members) > 1
        shell.press("ctrl+z")
        shell.wait_for("Stopped")
        # Each stops when it is scheduled next, which may be after the shell has said so. What does not stop is a hang.
        while not all(member.status() == psutil.STATUS_STOPPED for member in members):
            pass
        raw = bytes(shell.raw).rpartition(b"Stopped")[0]  # the shell has modes of its own
        for on, off in MODES:
            assert raw.rfind(f"\x1b[{off}".encode()) > raw.rfind(f"\x1b[{on}".encode()), off
        shell.screen.reset()
        shell.type("fg\r")
        shell.wait_until(lambda text: "say something long" in text and "Message" in text and "tiny F32" in text, "all")
        shell.wait_until(lambda text: "ready$" not in text, "a clean screen")
        shell.press("ctrl+c")
        shell.wait_for("stopped")
        shell.press("ctrl+z")
        shell.wait_for("Stopped")
        shell.type("kill %1\r")  # as it lies there stopped
        check_kept(members)
        shell.screen.reset()
        shell.type(f"{sys.executable} -m cpuchat.cli.main ask -q --model {tiny_model} hello; echo end\r")
        shell.wait_until(lambda text: text.partition("echo end")[2].strip(), "a part of an answer")
        members = psutil.Process(shell.pid).children(recursive=True)
        assert len(members) > 1
        shell.press("ctrl+z")
        while not all(member.status() == psutil.STATUS_STOPPED for member in members):
            pass
        shell.type("kill -9 %1; fg\r")
        assert not psutil.wait_procs(members, timeout=180)[1]


def test_a_worker_that_is_stopped_while_it_starts_does_not_keep_anyone_from_quitting(
    tiny_model: Path, tmp_path: Path
) -> None:
    with opened("--model", tiny_model, home=tmp_path) as terminal:
        app = psutil.Process(terminal.pid)
        while not (workers := [one for one in app.children() if "cpuchat.worker" in one.cmdline()]):
            pass
        workers[0].suspend()
        terminal.wait_for("loading tiny")
        members = family(terminal)
        terminal.press("ctrl+c", "ctrl+c", "ctrl+c")
        assert terminal.wait_for_end() == 0
        check_given_back(terminal)
        assert not psutil.wait_procs(members, timeout=180)[1]


def test_a_terminal_that_tells_little_is_used_as_one_of_80_by_24(tiny_model: Path, tmp_path: Path) -> None:
    little = {"term": "dumb", "columns": 0, "rows": 0}
    with opened("--model", tiny_model, home=tmp_path, **little) as terminal:
        terminal.wait_for("Enter sends")
        members = family(terminal)
        os.kill(terminal.pid, signal.SIGQUIT)
        assert terminal.wait_for_end() == 128 + signal.SIGQUIT
        assert "cpuchat: killed by SIGQUIT" in last_lines(terminal)
        check_given_back(terminal)
        assert not psutil.wait_procs(members, timeout=180)[1]


def test_quitting_does_not_wait_for_a_long_answer_to_be_shown(tmp_path: Path) -> None:
    with answering("`\n" * 20_000) as url, opened("--server", url, home=tmp_path) as terminal:
        terminal.wait_for("Enter sends")
        ask(terminal, "go")
        terminal.type("zq")
        terminal.wait_for("zq")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
        check_given_back(terminal)
        (_, answer) = stored()
        assert answer[1].startswith("`\n`\n") and answer[2] == "cancelled"
