"""The chat as lines of text, for screen readers and terminals that cannot draw: nothing is ever redrawn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping
from types import FrameType
from typing import Any

from cpuchat.backend.switching import SwitchingBackend
from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, Interrupted, UsageError
from cpuchat.base.text import clean_line
from cpuchat.chats.records import Chat
from cpuchat.chats.store import ChatStore
from cpuchat.cli.app import opening
from cpuchat.cli.options import keeping_backend
from cpuchat.cli.output import error_text, is_terminal
from cpuchat.cli.session import begin, each_interrupt, error_of, show_state, tell_notes, workers_stop_too
from cpuchat.cli.terminal import Phrases, TerminalOutput
from cpuchat.cli.tools import start_tools, tool_loop
from cpuchat.config import settings
from cpuchat.config.servers import Source
from cpuchat.present import answers as words
from cpuchat.present.chats import when
from cpuchat.present.tools import title
from cpuchat.protocol.messages import AnyEvent, CallDone, CallsMade, Failed, GenerationFinished, ModelLoaded, TextDelta
from cpuchat.session import events
from cpuchat.session.attachments import attach, start_folder
from cpuchat.session.chat import ChatSession
from cpuchat.session.conversation import Conversation
from cpuchat.session.events import Outgoing, SessionEvent

MANY_LINES = '"""'
"""On a line before and after a message of many lines."""


def read_line(prompt: str) -> str:
    """Return the next line, which may have been typed during an answer. Raises EOFError, KeyboardInterrupt,
    UsageError."""
    try:
        if is_terminal(sys.stdin):
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - history, and longer lines than a terminal passes on
            if _is_ended():
                raise EOFError
        text = input(prompt if is_terminal(sys.stdin) else "")
        text.encode()
    except UnicodeError:
        raise UsageError("Standard input is not valid UTF-8 text.", "Convert it, for example with iconv.") from None
    return text


def _is_ended() -> bool:
    """Return whether Ctrl+D is what was typed first during an answer, and take it: readline would read a NUL."""
    import fcntl
    import termios

    if not select.select([sys.stdin], [], [], 0)[0] or any(fcntl.ioctl(sys.stdin, termios.FIONREAD, bytes(4))):
        return False
    return not os.read(sys.stdin.fileno(), 1)


@contextlib.contextmanager
def _kept_lines() -> Iterator[None]:
    """Let the terminal keep the lines that were typed during an answer when Ctrl+C stops it; until this process ends,
    by a signal too."""
    if not is_terminal(sys.stdin):
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)

    def end(number: int, _: FrameType | None) -> None:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGQUIT)}
    termios.tcsetattr(sys.stdin, termios.TCSANOW, [*before[:3], before[3] | termios.NOFLSH, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def open_plain(model: str | None, values: Mapping[str, Any], *, server: str | None = None) -> int:
    """Run the chat until it is left; arguments and errors as `app.open_app`, but it needs no terminal."""
    chosen, library, initial, keys = opening(model, values, server)
    terminal = TerminalOutput(plain=True, show_reasoning=chosen.ui.show_reasoning)
    backend = SwitchingBackend(keeping_backend(chosen), keys)
    store = ChatStore(paths.chats_db(), or_in_memory=True)
    for notice in store.take_notices():
        terminal.warn(f"cpuchat: {notice}")
    core = Conversation(settings=chosen, backend=backend, store=store, library=library)
    with _kept_lines(), asyncio.Runner() as runner:
        try:
            chat = PlainChat(ChatSession(core), terminal, runner)
            runner.run(start_tools(tool_loop(values.get("tool_servers", ()), terminal), core, terminal))
            return chat.run(initial)
        finally:
            runner.run(core.close())


class PlainChat:
    """Reads lines, and answers them. The loop of `runner` runs only meanwhile, so that Ctrl+C reaches `input`.

    `do_…` are the commands; their docstrings, what `/help` says: the argument, and what they do."""

    def __init__(self, chat: ChatSession, terminal: TerminalOutput, runner: asyncio.Runner) -> None:
        self._chat, self._terminal, self._do = chat, terminal, runner.run
        chat.no_model = "No model is loaded. /model NAME loads one."
        chat.listen = self._show
        self._phrases: Phrases | None = None  # of the answer that is being written
        self._problem: CpuchatError | None = None  # why the last model was not loaded
        self._presses = 0  # of Ctrl+C
        self._listed: list[Chat] = []
        self._is_over = False

    def run(self, initial: Source) -> int:
        """Chat until /quit or the end of the input; returns the exit code."""
        self._do(self._settle(self._load(initial)))
        if not self._chat.loaded:
            return (self._problem or Interrupted).exit_code
        self._terminal.note("Type a message and press Enter. /help lists commands. Ctrl+C stops, Ctrl+D quits.")
        while not self._is_over and (text := self._next_message()) is not None:
            try:
                self._do(self._settle(self._act(text.strip())))
            except CpuchatError as error:
                self._terminal.warn(error_text(error))
        return 0

    def _next_message(self) -> str | None:
        """Return the next message or command; None to quit: at the end of the input, or by Ctrl+C twice."""
        for is_pressed in (False, True):
            try:
                text, lines = read_line("You: "), list[str]()
                if text.strip() != MANY_LINES:
                    return text
                with contextlib.suppress(EOFError):
                    while (line := read_line("")).strip() != MANY_LINES:
                        lines.append(line)
                return "\n".join(lines)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not is_pressed:
                    self._terminal.line()
                    self._terminal.note("Ctrl+C again, or Ctrl+D, quits.")
        return None

    async def _load(self, source: Source) -> None:
        self._chat.load(source)

    async def _act(self, text: str) -> None:
        """Begin what a line says."""
        command, _, rest = text.partition(" ")
        if run := getattr(self, f"do_{command[1:]}", None) if command.startswith("/") else None:
            await run(rest.strip())
        elif command.startswith("/") and "/" not in command[1:]:
            self._terminal.warn(f"No such command: {clean_line(command)}. /help lists them.")
        elif command:
            await self._send(text)

    async def _settle(self, begin: Coroutine[Any, Any, None]) -> None:
        """Begin something, and wait until nothing runs; Ctrl+C stops it. Lines that are typed meanwhile are next."""
        await begin
        with each_interrupt(self._interrupt), workers_stop_too(self._chat.conversation):
            await self._chat.settled()
        self._presses = 0

    def _interrupt(self, presses: int) -> None:
        self._presses = presses
        backend = self._chat.conversation.backend
        if presses > 1 and backend.pid is not None:  # one of a server would answer no more
            backend.kill()
        begin(self._chat.stop())

    def _show(self, event: SessionEvent) -> None:
        phrases, note = self._phrases, self._terminal.note
        if isinstance(event, events.AnswerEnded | events.SummaryEnded | Failed) and phrases is not None:
            phrases.finish()
            self._phrases = None
        match event:
            case events.Notice():
                note(event.text)
            case events.LoadBegun():
                self._terminal.begin_waiting()
                begun = words.load_begun(event.source)
                note(f"{begun[:1].upper()}{begun[1:]}.")
            case events.LoadEnded():
                self._end_load(event)
            case events.AnswerBegun():
                self._phrases = Phrases(self._terminal, self._chat.conversation.model_name)
                self._terminal.begin_waiting()
            case TextDelta() if phrases is not None:
                (phrases.reasoning if event.channel == "reasoning" else phrases.answer)(event.text)
            case CallsMade() if phrases is not None:
                if event.said:  # what is said after them is a paragraph of its own
                    phrases.answer("\n\n")
                show_state(event, self._terminal)
            case events.AnswerEnded() if not isinstance(event.last, Failed):
                self._end_answer(event.last)
            case events.SummaryEnded(last=Failed() as problem):
                self._fail(problem)
            case events.SummaryEnded(last=last):
                self._end_answer(last)
                done = words.summarized(last, event.trimmed) if isinstance(last, GenerationFinished) else ""
                note(done if event.is_kept else "Stopped. The chat is unchanged.")
            case Failed():
                self._fail(event)
            case _:
                show_state(event, self._terminal, self._chat.conversation.meter.prefill_left_s())

    def _end_load(self, event: events.LoadEnded) -> None:
        if not isinstance(event.last, ModelLoaded):
            return
        model = event.last.model
        facts = model.server or f"{model.n_threads} threads", f"context {model.n_ctx:,} tokens" if model.n_ctx else ""
        self._terminal.note(_words(clean_line(model.name), model.quantization, *facts))
        tell_notes(self._chat.conversation, model, self._terminal)
        try:
            settings.update({"model": {"last": str(event.source)}})
        except (CpuchatError, OSError) as error:  # a full disk: everything else works
            self._terminal.warn(f"Could not remember the model for the next start: {error}")

    def _end_answer(self, last: AnyEvent | None) -> None:
        if not isinstance(last, GenerationFinished):
            when = "during a tool call" if isinstance(last, CallDone) else "before the first token"
            self._terminal.warn(error_text(Interrupted(f"Stopped {when}.")))
            return
        self._terminal.note(_words(words.summary(last.timings, last.stop_reason), last.note, words.note(last.timings)))
        if self._chat.history.saver.answer is not None:
            self._terminal.warn(f"The answer could not be saved. {self._chat.history.saver.problem}")

    def _fail(self, failed: Failed) -> None:
        """Say what failed, unless the chat makes room for the question that failed."""
        if not self._chat.makes_room(failed):
            self._problem = error_of(failed, is_interrupted=self._presses > 0)
            self._terminal.warn(error_text(self._problem))

    async def _send(self, text: str, editing: int | None = None) -> None:
        sent = await asyncio.to_thread(attach, text, start_folder())
        if sent:
            self._terminal.note(f"Attached: {', '.join(clean_line(one.title) for one in sent)}.")
        self._chat.submit(Outgoing(text, lambda: sent, editing))

    async def do_edit(self, text: str) -> None:
        """TEXT: ask this in place of your last message, which keeps the other."""
        if not text:
            raise UsageError("No text given.", "Type it after /edit.")
        await self._send(text, editing=0)

    async def do_regenerate(self, _: str) -> None:
        """Regenerate the last answer."""
        self._chat.regenerate()

    async def do_compact(self, _: str) -> None:
        """Summarize the chat, which frees context."""
        self._chat.summarize()

    async def do_model(self, name: str) -> None:
        """NAME: load a model: a file, a repository or the address of a server."""
        if not name:
            raise UsageError("No model given.", "`cpuchat models list` lists those on this machine.")
        await self._load(await asyncio.to_thread(self._chat.find_model, name))

    async def do_help(self, _: str) -> None:
        """List the commands."""
        for name, command in vars(PlainChat).items():
            if name.startswith("do_"):
                about = command.__doc__ or ""
                has_argument = about.partition(":")[0].isupper()
                self._terminal.line(f"/{name[3:]} {about}" if has_argument else f"/{name[3:]}: {about}")
        self._terminal.line(f"A message of many lines: {MANY_LINES} on a line before and after it.")

    async def do_quit(self, _: str) -> None:
        """Quit; chats are saved."""
        self._is_over = True

    async def do_new(self, _: str) -> None:
        """Start a new chat."""
        self._chat.new()
        self._terminal.note("New chat.")

    async def do_chats(self, query: str) -> None:
        """WORDS: list the last chats, or those that have these words."""
        found = await self._chat.history.list_chats(query)
        self._listed = [one for one in found if not one.sides][:20]
        for number, chat in enumerate(self._listed, 1):
            self._terminal.line(f"{number}. {clean_line(chat.title) or 'New chat'}, {when(chat.updated)}")
        if not self._listed:
            self._terminal.note("No chats match." if query else "No chats yet.")

    async def do_open(self, number: str) -> None:
        """N: open chat N of that list."""
        chats = {str(at): chat for at, chat in enumerate(self._listed, 1)}
        if number not in chats:
            raise UsageError(f"No chat {clean_line(number) or 'given'}.", "/chats lists them by number.")
        await self._chat.open(chats[number].id)
        await self.do_history("")

    async def do_history(self, _: str) -> None:
        """Print the open chat."""
        for message in self._chat.messages:
            answered = "Summary" if message.is_summary else clean_line(message.model) or "Answer"
            speaker = "You" if message.role == "user" else answered
            for step in message.steps:
                if said := step.said.strip():
                    self._terminal.line(f"{speaker}: {said}")
                for call in step.calls:
                    self._terminal.note(f"The model called {title(call)}.")
            self._terminal.line(f"{speaker}: {message.content}")
            for attachment in message.attachments:
                self._terminal.note(f"Attached: {clean_line(attachment.title)}.")


def _words(*parts: str) -> str:
    """Join figures as a sentence reads them: a screen reader names every middle dot."""
    return ", ".join(filter(None, parts)).replace(" · ", ", ")
