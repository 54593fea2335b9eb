"""The driver of the terminal, keys in the order in which they were typed, and the last filter before the terminal.

Textual's driver gives the terminal back when its own message loop ends in order. Here the rest is seen to: signals, a
terminal that is closed, Ctrl+Z, and a loop that is stuck.

Textual hands characters to the focused widget, but acts on bound keys in the app: Enter overtakes the text before it,
and Backspace is overtaken by the text after it. What follows a key that opens a screen, moves the focus or reads
something (a chat, say) would go to the widget that had the focus before. Here it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TextIO, TypeVar

from rich.cells import cell_len
from rich.segment import Segment
from textual import constants, events
from textual.app import App
from textual.color import Color
from textual.dom import DOMNode
from textual.drivers.linux_driver import LinuxDriver
from textual.filter import LineFilter
from textual.message import Message
from textual.message_pump import Callback, MessagePump
from textual.screen import Screen
from textual.widgets import Input, TextArea

from cpuchat.base.text import is_safe, replace_unsafe
from cpuchat.session.conversation import stop_with_workers
from cpuchat.tui.terminal.background import QUERY
from cpuchat.tui.terminal.input import InputParser

# Undoes all that the driver may have switched on: synchronized output, bracketed paste, no line wrap, resize reports,
# mouse, keyboard protocol, alternate screen, hidden cursor, focus reports, colors.
_RESET = (
    "\x1b[?2026l\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1016l"
    "\x1b[<u\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l\x1b[0m"
)
# Kitty's protocol as Textual asks for it, and the key of the base layout in each report: shortcuts are found by it.
_PUSH_KEYBOARD, _POP_KEYBOARD = "" if constants.DISABLE_KITTY_KEY else "\x1b[>29u", "\x1b[<u"
_WRITABLE_SECONDS = 0.5  # a terminal that takes nothing for so long gets no farewell


class _Output:
    """The terminal as a file; once it is gone, writes are dropped."""

    def __init__(self, file: TextIO, gone: Callable[[], None]) -> None:
        self._file = file
        self._gone = gone

    def write(self, text: str) -> None:
        self._try(lambda: self._file.write(text))

    def flush(self) -> None:
        self._try(self._file.flush)

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return True

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, ValueError):
            self._gone()


class TerminalDriver(LinuxDriver):
    """Textual's driver, which also stops the whole job on Ctrl+Z and notices that the terminal is gone.

    `active` tells whether the terminal is taken over now."""

    active = False

    def __init__(self, app: App[Any], **options: Any) -> None:
        super().__init__(app, **options)
        self._job: Any = app  # the `ChatApp`, which imports this module
        # Not Rich's, which has a size of its own for dumb terminals and those of 0×0: Textual would lay out for either
        # size in turn, for ever.
        self._size = self._get_terminal_size()
        self._lost_once = False
        # stdout, which was checked to be a terminal: stderr may go into a file.
        self._file = _Output(sys.__stdout__ or self._file, self._lost)  # type: ignore[assignment]
        # The driver's own handlers stop only this process, and start a second reader after a SIGSTOP.
        signal.signal(signal.SIGTSTP, lambda *_: self._soon(self.suspend_job))
        signal.signal(signal.SIGCONT, lambda *_: self._soon(self._continued))
        threading.Thread(target=self._await_hangup, name="hangup", daemon=True).start()

    def _soon(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback)

    def start_application_mode(self) -> None:
        self.active = True
        super().start_application_mode()
        self.write(_PUSH_KEYBOARD + (QUERY if self._job.asks_background else ""))
        self.flush()

    def stop_application_mode(self) -> None:
        if self.active:
            self.write(_POP_KEYBOARD if _PUSH_KEYBOARD else "")
            super().stop_application_mode()
            self.active = False

    def disable_input(self) -> None:
        if self.active:  # in the background, the kernel stops whoever touches the terminal
            super().disable_input()

    def write(self, data: str) -> None:
        if self.active and self._writer_thread is not None:
            super().write(data)

    # Ctrl+Z

    def suspend_job(self) -> None:
        """Give the terminal back, stop, and take it over again when the shell continues the job."""
        if not self.active:
            return
        self.suspend_application_mode()
        stop_with_workers(self._job.services.conversations)
        if not self._job.signalled:  # else the terminal is the shell's
            self._take_over()

    def _continued(self) -> None:
        """Take the terminal over again after a SIGSTOP: the shell has reconfigured it."""
        if self.active:
            self.suspend_application_mode()
            self._take_over()

    def _take_over(self) -> None:
        self.resume_application_mode()
        self._app.refresh(layout=True)

    # The terminal is gone

    def _await_hangup(self) -> None:
        poll = select.poll()
        poll.register(self.fileno, 0)
        with contextlib.suppress(OSError):
            if any(what & select.POLLHUP for _, what in poll.poll()):
                self._lost()

    def _run_input_thread(self) -> None:
        try:
            self.run_input_thread()
        except OSError:
            self._lost()

    def run_input_thread(self) -> None:
        """Process what comes in until the input is disabled; only its end is the end of the terminal. Raises OSError:
        the terminal is gone."""
        parser, patience = InputParser(), 0.0
        while not self.exit_event.is_set():
            messages: list[Message] = []
            if select.select([self.fileno], [], [], patience)[0]:
                if not (data := os.read(self.fileno, 1 << 16)):
                    raise OSError("end of input")
                for part in (data,) if patience else _typed_before(data):
                    messages += parser.feed(part)
            patience = 0.02 if parser.held else 0.1
            for message in (*messages, *parser.tick()):
                self.process_message(message)

    def _lost(self) -> None:
        if not self._lost_once:
            self._lost_once = True
            self._soon(lambda: self._job.end_by(signal.SIGHUP))

    # The last resort

    def restore(self) -> None:
        """Restore the terminal without the driver's threads, from anywhere."""
        if not self.active:
            return
        self.active = False
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [self._file.fileno()], [], _WRITABLE_SECONDS)[1]:
                os.write(self._file.fileno(), _RESET.encode())
        if self.attrs_before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.fileno, termios.TCSANOW, self.attrs_before)


def _typed_before(data: bytes) -> tuple[bytes, ...]:
    """Return what was typed before the terminal was set up, which made a line feed of Enter: the last one is the key.
    Those between lines stay: a pasted text is one message."""
    return (data[:-1], b"\r") if data.endswith(b"\n") else (data,)


Result = TypeVar("Result")
_PATIENCE = 1.0  # s; only if a widget waits for the app itself, which it must not
_HELD_PATIENCE = 5.0  # s; for a disk that is slow, and for a screen that opens on a busy machine


class OrderedKeys(App[Result]):
    """An app that handles a bound key only after its widgets have processed everything typed before, and at once with
    all that follows from it; and a screen's keys only after it has opened.

    Text that is no key on a screen with a `TEXT_FIELD` (a selector) goes there."""

    _open: Screen[object] | None = None
    _acting = False
    _acted_on: DOMNode | None = None  # by the key before, which may have sent messages
    _n_holds = 0

    def __init__(self) -> None:
        super().__init__()
        self._released = asyncio.Event()

    @contextlib.contextmanager
    def keys_held(self) -> Iterator[None]:
        """Inside, what is typed waits: it is meant for what is being opened."""
        self._n_holds += 1
        self._released.clear()
        try:
            yield
        finally:
            self._n_holds -= 1
            if not self._n_holds:
                self._released.set()

    def call_later(self, callback: Callback, *args: Any, **kwargs: Any) -> bool:
        """Call after what is queued, but before the next key if it follows from one: `Widget.focus` waits here."""
        if not self._acting:
            return super().call_later(callback, *args, **kwargs)
        self.call_next(callback, *args, **kwargs)
        return True

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            is_text = isinstance(event, events.Paste) or event.is_printable
            if await self._opened() and is_text:  # typed before anything was shown that has keys of its own
                self._focus_text_field()
            if isinstance(event, events.Key) and await self._acted(event):
                return
            if is_text and (isinstance(event, events.Paste) or event.key != "space"):
                self._focus_text_field()
        await super().on_event(event)

    async def _opened(self) -> bool:
        """Wait until the screen on top has its widgets and its focus; return whether keys were held for that."""
        if (node := self._acted_on) is not None:
            self._acted_on = None
            await self._follow(_settled(node))
        await asyncio.sleep(0)  # a screen that gives an answer is opened by a worker, in its first step
        if held := self._n_holds > 0:
            await self._follow(self._all_released(), _HELD_PATIENCE)
        while (screen := self.screen) is not self._open:
            await _patiently(_emptied(screen), _HELD_PATIENCE)
            self._open = screen
        return held

    async def _follow(self, wait: Awaitable[None], limit: float = _PATIENCE) -> None:
        """Wait for what follows from the key before, with what that calls later in this app: the focus, for example."""
        self._acting = True
        try:
            await _patiently(wait, limit)
        finally:
            self._acting = False
        await self._flush_next_callbacks()

    async def _all_released(self) -> None:
        while self._n_holds:
            await self._released.wait()

    def _focus_text_field(self) -> None:
        selector: str = getattr(self.screen, "TEXT_FIELD", "")
        if selector and not isinstance(self.focused, Input | TextArea):
            self.screen.set_focus(self.screen.query_one(selector))

    async def _acted(self, event: events.Key) -> bool:
        """Run what `event` is bound to; False leaves the key to Textual."""
        while True:
            focused = self.focused
            if event.is_printable and isinstance(focused, Input | TextArea):
                return False
            if not self.app_focus:  # this key brings the focus back
                return False
            await _patiently(_settled(self.screen if focused is None else focused))
            if self.screen is self._open:
                break
            await self._opened()  # by what was processed meanwhile
        if event.key == "escape":
            self.screen.clear_selection()  # as screens do when the key has climbed to them
        self._acting = True
        try:
            acted = await self._check_bindings(event.key, priority=True)
            if not acted and not (isinstance(focused, TextArea) and event.key == "enter"):  # a line break, no binding
                acted = await self._check_bindings(event.key)
        finally:
            self._acting = False
        self._acted_on = focused if acted else None
        return acted


async def _patiently(wait: Awaitable[None], limit: float = _PATIENCE) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit):
            await wait


async def _settled(focused: DOMNode) -> None:
    """Wait until `focused`, and all that it tells of changes up to its screen, has seen what it was sent before."""
    await _emptied(focused)  # the keys themselves
    for node in focused.ancestors_with_self:  # "changed" climbs from the widget to who listens
        if isinstance(node, App):
            break
        await _emptied(node)


async def _emptied(node: MessagePump) -> None:
    done = asyncio.Event()
    if node.call_later(done.set):
        await done.wait()


class Gate(LineFilter):
    """Replaces control characters in every row of every widget by blanks of the same width: text that was not cleaned
    cannot control the terminal either."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(map(_passes, segments)):
            return segments
        return [segment if _passes(segment) else _blanked(segment) for segment in segments]


def _passes(segment: Segment) -> bool:
    text, style, _ = segment
    if not text.isprintable() and ("\n" in text or "\t" in text or not is_safe((text,))):
        return False
    return style is None or style.link is None or (style.link.isprintable() and style.link.isascii())


def _blanked(segment: Segment) -> Segment:
    text = replace_unsafe(segment.text, lambda character: " " * cell_len(character))
    text = text.replace("\n", " " * cell_len("\n")).replace("\t", " " * cell_len("\t"))
    return Segment(text, segment.style.update_link(None) if segment.style is not None else None)
