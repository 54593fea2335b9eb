"""The chat as lines of text, for screen readers and terminals that cannot draw: nothing is ever redrawn."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuchat.errors import CpuchatError, UsageError
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.chats.records import Chat, StoredMessage
    from cpuchat.cli.session import Session
    from cpuchat.cli.terminal import Terminal
    from cpuchat.models.library.library import Library
    from cpuchat.protocol import AnyEvent
    from cpuchat.servers import Source

_MANY_LINES = '"""'
_MOST_CHATS = 20
_LONGEST_PHRASE = 240
_PHRASE = re.compile(r"\n|[.!?:;…][\"')\]”’*_]*\s|[。！？]")


def open_plain(model: str | None, values: Mapping[str, Any], *, server: str | None = None) -> int:
    """Run the chat until it is left; arguments and errors as `app.open_app`, but it needs no terminal."""
    from cpuchat import paths
    from cpuchat.backend.local import LocalBackend
    from cpuchat.backend.switching import SwitchingBackend
    from cpuchat.chats.store import ChatStore
    from cpuchat.cli.app import initial_model, require_draft
    from cpuchat.cli.options import key_ring, overridden, server_model, with_preset
    from cpuchat.cli.session import Session
    from cpuchat.cli.terminal import Terminal
    from cpuchat.models.library.library import Library

    _, model = with_preset(values.get("chat__preset"), model, server)
    served, chosen = server_model(server, model, values), overridden(values)
    library = Library(chosen.model.folders)
    initial = served or initial_model(library, model, chosen, values)
    if isinstance(initial, Path) and values.get("speculation__draft_model") is not None:
        require_draft(initial, chosen, library)
    local = LocalBackend(state_dir=paths.kv_dir(), state_limit=int(chosen.engine.saved_kv_gb * 1e9))
    terminal = Terminal(plain=True)
    session = Session(chosen, terminal, SwitchingBackend(local, key_ring(chosen, served)), ChatStore(paths.chats_db()))
    session.conversation.preset.of_new_chats = lambda: chosen.chat.preset
    with asyncio.Runner() as runner:
        try:
            return PlainChat(session, terminal, library, runner).run(initial)
        finally:
            runner.run(session.conversation.close())


class PlainChat:
    """Reads lines, and answers them. The loop of `runner` runs only meanwhile, so that Ctrl+C reaches `input`."""

    def __init__(self, session: Session, terminal: Terminal, library: Library, runner: asyncio.Runner) -> None:
        self._session, self._terminal, self._library, self._do = session, terminal, library, runner.run
        self._conversation = session.conversation
        self._conversation.library = library
        self._listed: list[Chat] = []
        self._commands: dict[str, tuple[str, Callable[[str], Coroutine[Any, Any, None]]]] = {
            "/help": ("list the commands", self._help),
            "/new": ("start a new chat", self._new),
            "/chats": ("WORDS: list the last chats, or those that have these words", self._chats),
            "/open": ("N: open chat N of that list", self._open),
            "/history": ("print the open chat", self._history),
            "/regenerate": ("answer the last question again", self._regenerate),
            "/preset": ("NAME: use a preset from the next answer on; without a name, list them", self._preset),
            "/compact": ("summarize the chat, which frees context", self._compact),
            "/model": ("NAME: load a model: a file, a repository or the address of a server", self._model),
            "/models": ("list the models on this machine", self._models),
            "/figures": ("all figures of the last answer", self._figures),
            "/quit": ("quit; chats are saved", self._help),
        }

    def run(self, initial: Source) -> int:
        """Chat until /quit or the end of the input; returns the exit code. Raises CpuchatError: no first model."""
        self._do(self._load(initial))
        self._terminal.note("Type a message and press Enter. /help lists commands. Ctrl+C stops, Ctrl+D quits.")
        while (text := self._read()) is not None:
            command, _, rest = text.strip().partition(" ")
            if command == "/quit":
                return 0
            try:
                if command in self._commands:
                    self._do(self._commands[command][1](rest.strip()))
                elif command.startswith("/") and "/" not in command[1:]:
                    self._terminal.warn(f"No such command: {clean_line(command)}. /help lists them.")
                elif command:
                    self._do(self._ask(text.strip()))
            except CpuchatError as error:
                from cpuchat.cli.output import error_text

                self._terminal.warn(error_text(error))
        return 0

    # Input

    def _read(self) -> str | None:
        """Return the next message or command; None to quit: at the end of the input, or by Ctrl+C twice."""
        pressed = False
        while True:
            try:
                text = self._line("You: ")
                if text.strip() != _MANY_LINES:
                    return text
                return self._lines()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if pressed:
                    return None
                pressed = True
                self._terminal.line()
                self._terminal.note("Ctrl+C again, or Ctrl+D, quits.")

    def _lines(self) -> str:
        """Return the lines up to the closing mark, or to the end of the input."""
        lines: list[str] = []
        with contextlib.suppress(EOFError):
            while (line := self._line("")).strip() != _MANY_LINES:
                lines.append(line)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        """Return one line. Raises EOFError, KeyboardInterrupt, UsageError."""
        from cpuchat.cli.terminal import is_terminal

        if is_terminal(sys.stdin):
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - history, and longer lines than a terminal passes on
        else:
            prompt = ""
        try:
            text = input(prompt)
            text.encode()
        except UnicodeError:
            raise UsageError("Standard input is not valid UTF-8 text.", "Convert it, for example with iconv.") from None
        return text

    # Answers

    async def _ask(self, text: str) -> None:
        from cpuchat.attachments import attach, start_folder

        sent = await asyncio.to_thread(attach, text, start_folder())
        if sent:
            self._terminal.note(f"Attached: {', '.join(clean_line(one.title) for one in sent)}.")
        await self._answer(self._conversation.send(text, attach=lambda: sent))

    async def _regenerate(self, _: str) -> None:
        await self._answer(self._conversation.regenerate())

    async def _answer(self, events: AsyncGenerator[AnyEvent, None]) -> None:
        from cpuchat.cli.session import Answer
        from cpuchat.present.answers import summary

        sink = _Phrases(self._terminal, self._conversation.model_name, self._conversation.settings.ui.show_reasoning)
        self._terminal.begin_waiting()
        with self._session.interruptible():
            try:
                finished = await self._session.stream(events, Answer(), sink)
            finally:
                sink.finish()
                self._terminal.end_answer()
        self._terminal.note(_words(summary(finished.timings, finished.stop_reason), finished.note))
        if self._conversation.history.unsaved is not None:
            self._terminal.warn(f"The answer could not be saved. {self._conversation.history.save_problem}")

    async def _compact(self, _: str) -> None:
        from cpuchat.compacting import compact

        await self._answer(compact(self._conversation))
        if self._conversation.messages[-1].is_summary:
            self._terminal.note("The model now reads this summary in place of what comes before.")

    async def _preset(self, name: str) -> None:
        from cpuchat.presets import find_preset, load_presets

        if name:
            preset = await asyncio.to_thread(find_preset, name)
            await self._conversation.preset.choose(preset, self._conversation.settings)
            self._terminal.note(f"Preset from the next answer: {clean_line(preset.name)}.")
            if preset.model:
                await self._model(preset.model)
        else:
            names = await asyncio.to_thread(load_presets)
            self._terminal.line(", ".join(map(clean_line, names)) or "There are no presets.")

    async def _figures(self, _: str) -> None:
        from cpuchat.present.answers import full_summary

        answers = [one for one in self._conversation.messages if one.timings is not None]
        if not answers or answers[-1].timings is None:
            self._terminal.note("No answer yet.")
        else:
            self._terminal.line(_words(full_summary(answers[-1].timings, answers[-1].stop_reason or "")))

    # Models

    async def _load(self, source: Source) -> None:
        from cpuchat import settings

        self._terminal.begin_waiting()
        self._terminal.note(f"Loading {clean_line(source.stem) or source}.")
        with self._session.interruptible():
            info = await self._session.load(source)
        problem = self._conversation.draft_problem
        place = info.server or f"{info.n_threads} threads"
        context = f"context {info.n_ctx:,} tokens" if info.n_ctx else ""
        self._terminal.note(_words(clean_line(info.name), info.quantization, place, context))
        for note in filter(None, (problem, *info.notes)):
            self._terminal.note(note)
        await asyncio.to_thread(settings.update, {"model": {"last": str(source)}})

    async def _model(self, name: str) -> None:
        from cpuchat.servers import ServerModel, is_url

        if not name:
            raise UsageError("No model given.", "/models lists those on this machine.")
        await self._load(ServerModel.of(name) if is_url(name) else await asyncio.to_thread(self._library.resolve, name))

    async def _models(self, _: str) -> None:
        for model in await asyncio.to_thread(self._library.local_models):
            state = "damaged" if model.damaged else ""
            self._terminal.line(_words(clean_line(model.name), model.quantization, str(model.path), state))

    # Chats

    async def _new(self, _: str) -> None:
        self._conversation.new_chat()
        self._terminal.note("New chat.")

    async def _chats(self, words: str) -> None:
        from cpuchat.present.chats import when

        self._listed = [one for one in await self._conversation.history.list_chats(words) if not one.sides][
            :_MOST_CHATS
        ]
        for number, chat in enumerate(self._listed, 1):
            self._terminal.line(f"{number}. {clean_line(chat.title) or 'New chat'}, {when(chat.updated)}")
        if not self._listed:
            self._terminal.note("No chats match." if words else "No chats yet.")

    async def _open(self, number: str) -> None:
        if not number.isdecimal() or not 0 < int(number) <= len(self._listed):
            raise UsageError(f"No chat {clean_line(number) or 'given'}.", "/chats lists them by number.")
        await self._conversation.open_chat(self._listed[int(number) - 1].id)
        for message in self._conversation.messages[-2:]:
            self._print(message)

    async def _history(self, _: str) -> None:
        for message in self._conversation.messages:
            self._print(message)

    def _print(self, message: StoredMessage) -> None:
        answered = "Summary" if message.is_summary else clean_line(message.model) or "Answer"
        speaker = "You" if message.role == "user" else answered
        self._terminal.line(f"{speaker}: {message.content}")
        for attachment in message.attachments:
            self._terminal.note(f"Attached: {clean_line(attachment.title)}.")

    async def _help(self, _: str) -> None:
        for name, (about, _run) in self._commands.items():
            argument, colon, words = about.partition(": ")
            self._terminal.line(f"{name} {argument}: {words}" if colon else f"{name}: {about}")
        self._terminal.line(f"A message of many lines: {_MANY_LINES} on a line before and after it.")


class _Phrases:
    """Prints an answer in sentences and lines: from single words, a screen reader makes stammering."""

    def __init__(self, terminal: Terminal, name: str, show_reasoning: bool) -> None:
        self._terminal, self._name, self._shows = terminal, clean_line(name) or "Answer", show_reasoning
        self._waiting = ""
        self._begun = self._reasoned = False

    def answer(self, text: str) -> None:
        self._waiting += text
        end = max((found.end() for found in _PHRASE.finditer(self._waiting)), default=0)
        if not end and len(self._waiting) > _LONGEST_PHRASE:
            end = self._waiting.rfind(" ") + 1 or len(self._waiting)
        self._print(end)

    def reasoning(self, text: str) -> None:
        if self._shows:
            self._terminal.reasoning(text)
        elif not self._reasoned:
            self._terminal.note("The model is reasoning.")
        self._reasoned = True

    def finish(self) -> None:
        """Print the rest."""
        self._print(len(self._waiting))

    def _print(self, end: int) -> None:
        phrase, self._waiting = self._waiting[:end], self._waiting[end:]
        if phrase:
            self._terminal.answer(phrase if self._begun else f"{self._name}: {phrase.lstrip()}")
            self._begun = True


def _words(*parts: str) -> str:
    """Join figures as a sentence reads them: a screen reader names every middle dot."""
    return ", ".join(filter(None, parts)).replace(" · ", ", ")
