"""Runs the app, and handles an app that did not quit by itself: the terminal is restored, and no traceback is shown."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import signal_name
from cpuchat.base.text import clean
from cpuchat.session.conversation import Conversation
from cpuchat.tui.app import ChatApp
from cpuchat.tui.terminal import crash
from cpuchat.tui.terminal.background import set_colorterm

_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def run(make: Callable[[], ChatApp]) -> int:
    """Run what `make` returns until the user leaves it; returns the exit code: 0, 1 after an error, 128 + the number of
    the signal that ended it."""
    set_colorterm()
    app = make()
    with _signals(app), _threads(app):
        try:
            app.run()
        except BaseException as error:  # the app's own way out failed
            app.crash = app.crash or crash.record(error)
        finally:
            app.give_terminal_back()
    not_saved = print_unsaved(app.conversation)
    if app.signalled:
        _tell(f"killed by {signal_name(app.signalled)}. {_kept(app.saved)}")
        return 128 + app.signalled
    if app.crash is not None:
        _tell(f"internal error ({app.crash.what}). {_kept(app.saved)} {app.crash.log_words}")
        return CpuchatError.exit_code
    return app.return_code or not_saved


def print_unsaved(conversation: Conversation) -> int:
    """Print an answer that could not be saved, so that it can be copied; returns the exit code."""
    answer, problem = conversation.history.saver.answer, conversation.history.saver.problem
    if answer is None or problem is None:
        return 0
    _tell(f"could not save the last answer. {problem} Its text:")
    with contextlib.suppress(OSError, ValueError):
        print(clean(answer.content or answer.reasoning), flush=True)
    return problem.exit_code


def _kept(saved: bool) -> str:
    return "Your chat is saved." if saved else "The last answer may be incomplete on disk."


def _tell(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone
        print(f"cpuchat: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals(app: ChatApp) -> Iterator[None]:
    """End the app in order on the first signal, at once on the next: its event loop may be stuck. Signals that were
    ignored stay ignored."""

    def ended(number: int, _frame: FrameType | None) -> None:
        first, app.signalled = not app.signalled, app.signalled or number
        if first:
            if (loop := app._loop) is not None and not loop.is_closed():
                loop.call_soon_threadsafe(app.end_by, number)
        elif number != signal.SIGHUP:  # that comes from the kernel and from the shell
            with contextlib.suppress(BaseException):
                app.conversation.history.save()  # quick
            app.give_terminal_back()
            os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, ended)
    try:
        yield
    finally:
        for number in handled:
            # Not Python's own handler for Ctrl+C: its KeyboardInterrupt would be shown by the dying interpreter.
            ours = before[number] is signal.default_int_handler
            signal.signal(number, signal.SIG_DFL if ours else before[number])


@contextlib.contextmanager
def _threads(app: ChatApp) -> Iterator[None]:
    """End the app when a thread ends with an error; errors in destructors are only logged."""

    def thread_failed(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            app.fail_from_thread(args.exc_value)

    def unraisable(args: Any) -> None:
        if args.exc_value is not None:
            crash.record(args.exc_value)

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = thread_failed, unraisable
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before
