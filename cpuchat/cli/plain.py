"""The chat as lines of text, for screen readers and terminals that cannot draw: nothing is ever redrawn."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from cpuchat.base import paths
from cpuchat.base.errors import ContextFull, CpuchatError, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.output import error_text
from cpuchat.cli.plain_chats import Commands, PlainChats
from cpuchat.cli.terminal import Phrases, Terminal, is_terminal
from cpuchat.cli.typed_ahead import TypedAhead
from cpuchat.present import answers as reuse
from cpuchat.present.answers import WHEN_FULL, full_summary, reasoning, summarized, summary
from cpuchat.protocol.messages import ContextTrimmed

if TYPE_CHECKING:
    from cpuchat.chats.history import Attach
    from cpuchat.chats.records import WhenFull
    from cpuchat.cli.session import Session
    from cpuchat.config.servers import Source
    from cpuchat.models.library.library import Library
    from cpuchat.protocol.messages import AnyEvent, GenerationFinished

_MANY_LINES = '"""'


def open_plain(model: str | None, values: Mapping[str, Any], *, server: str | None = None) -> int:
    """Run the chat until it is left; arguments and errors as `app.open_app`, but it needs no terminal."""
    from cpuchat.backend.local import LocalBackend
    from cpuchat.backend.switching import SwitchingBackend
    from cpuchat.chats.store import ChatStore
    from cpuchat.cli.app import initial_model, require_draft
    from cpuchat.cli.options import key_ring, overridden, server_model, with_preset
    from cpuchat.cli.session import Session
    from cpuchat.cli.tools import start_tools, tool_loop
    from cpuchat.models.library.library import Library

    _, model = with_preset(values.get("chat__preset"), model, server)
    served, chosen = server_model(server, model, values), overridden(values)
    library = Library(chosen.model.folders)
    initial = served or initial_model(library, model, chosen, values)
    require_draft(initial, chosen, values, library)
    local = LocalBackend(state_dir=paths.kv_dir(), state_limit=int(chosen.engine.saved_kv_gb * 1e9))
    terminal = Terminal(plain=True, show_reasoning=chosen.ui.show_reasoning)
    session = Session(chosen, terminal, SwitchingBackend(local, key_ring(chosen, served)), ChatStore(paths.chats_db()))
    session.conversation.preset.of_new_chats = lambda: chosen.chat.preset
    session.conversation.asks_when_full = is_terminal(sys.stdin)
    with asyncio.Runner() as runner:
        try:
            chat = PlainChat(session, terminal, library, runner)
            folder, names = values.get("tools_folder"), values.get("tool_servers", ())
            runner.run(start_tools(tool_loop(folder, names, terminal, chat.typed.line), session, terminal))
            return chat.run(initial)
        finally:
            runner.run(session.conversation.close())


class PlainChat:
    """Reads lines, and answers them. The loop of `runner` runs only meanwhile, so that Ctrl+C reaches `input`."""

    def __init__(self, session: Session, terminal: Terminal, library: Library, runner: asyncio.Runner) -> None:
        self._session, self._terminal, self._library, self._do = session, terminal, library, runner.run
        self._conversation = session.conversation
        self._conversation.library = library
        self._loaded: Source | None = None
        self.typed = TypedAhead(self._answer_now)
        self._sink: Phrases | None = None  # of the answer that is being written
        self._ending: asyncio.Task[None] | None = None
        self._commands: Commands = {
            "/help": ("list the commands", self._help),
            **PlainChats(session.conversation, terminal).commands,
            "/edit": ("TEXT: ask this in place of your last message, which keeps the other", self._edit),
            "/regenerate": ("regenerate the last answer", self._regenerate),
            "/preset": ("NAME: use a preset from the next answer on, or none; without a name, list them", self._preset),
            "/reasoning": (
                "CHOICE: how the model reasons in this chat: on, off, default, or a number of tokens at most",
                self._reasoning,
            ),
            "/compact": ("summarize the chat, which frees context", self._compact),
            "/model": ("NAME: load a model: a file, a repository or the address of a server", self._model),
            "/models": ("list the models on this machine", self._models),
            "/figures": ("show all figures of the last answer", self._figures),
            "/quit": ("quit; chats are saved", self._help),
        }

    def run(self, initial: Source) -> int:
        """Chat until /quit or the end of the input; returns the exit code. Raises CpuchatError: no first model."""
        self._do(self._load(initial))
        self._terminal.note("Type a message and press Enter. /help lists commands. Ctrl+C stops, Ctrl+D quits.")
        while (text := self._read()) is not None:
            if text.strip().partition(" ")[0] == "/quit":
                return 0
            try:
                try:
                    self._run(text)
                except ContextFull as error:
                    self._do(self._context_full(self._when_full(error)))
            except CpuchatError as error:
                self._warn(error)
        return 0

    def _run(self, text: str) -> None:
        """Run a command, or answer a message."""
        command, _, rest = text.strip().partition(" ")
        command = "/regenerate" if command == "/again" else command  # as it was called in the app
        if command in self._commands:
            self._do(self._commands[command][1](rest.strip()))
        elif command.startswith("/") and "/" not in command[1:]:
            self._terminal.warn(f"No such command: {clean_line(command)}. /help lists them.")
        elif command:
            self._do(self._ask(text.strip()))

    def _warn(self, error: CpuchatError) -> None:
        self._terminal.warn(error_text(error))

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
        """Return one line, first those that were typed during an answer. Raises as `_input`."""
        if self.typed.lines:
            text = self.typed.lines.popleft()
            self._terminal.note(f"{prompt}{clean_line(text)}")
            return text
        if self.typed.ended:
            raise EOFError
        return self._input(prompt)

    def _input(self, prompt: str) -> str:
        """Return one line that is typed now. Raises EOFError, KeyboardInterrupt, UsageError."""
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
        attach = await self._attached(text)
        await self._answer(self._conversation.send(text, attach=attach))

    async def _edit(self, text: str) -> None:
        if not text:
            raise UsageError("No text given.", "Type it after /edit.")
        attach = await self._attached(text)
        await self._answer(self._conversation.edit(text, attach=attach))

    async def _attached(self, text: str) -> Attach:
        """Read what a message names, and say it."""
        from cpuchat.attachments import attach, start_folder

        sent = await asyncio.to_thread(attach, text, start_folder())
        if sent:
            self._terminal.note(f"Attached: {', '.join(clean_line(one.title) for one in sent)}.")
        return lambda: sent

    async def _regenerate(self, _: str) -> None:
        await self._answer(self._conversation.regenerate())

    async def _answer(self, events: AsyncGenerator[AnyEvent, None]) -> GenerationFinished:
        from cpuchat.cli.session import Answer

        model, shows = self._conversation.model, self._conversation.settings.ui.show_reasoning
        can_end = is_terminal(sys.stdin) and model is not None and not model.server
        hint = "Enter answers now." if can_end else ""
        self._sink = sink = Phrases(self._terminal, self._conversation.model_name, shows, hint)
        self._terminal.begin_waiting()
        with self._session.interruptible(), self.typed.reading():
            try:
                finished = await self._session.stream(events, Answer(), sink)
            finally:
                sink.finish()
                self._terminal.end_answer()
        self._terminal.note(_words(summary(finished.timings, finished.stop_reason), finished.note))
        if note := reuse.note(finished.timings):
            self._terminal.note(note)
        if self._conversation.history.unsaved is not None:
            self._terminal.warn(f"The answer could not be saved. {self._conversation.history.save_problem}")
        return finished

    def _answer_now(self) -> None:
        """End the reasoning if the model is reasoning."""
        if self._sink is not None and self._sink.is_reasoning:
            self._ending = asyncio.ensure_future(self._end_reasoning())

    async def _end_reasoning(self) -> None:
        if not await self._conversation.end_reasoning():
            self._terminal.note("The server cannot end the reasoning. Ctrl+C stops the answer.")

    async def _compact(self, _: str) -> None:
        await self._summarized()

    async def _summarized(self) -> bool:
        """Summarize the chat; False when that was stopped."""
        from cpuchat.compacting import compact

        trimmed: ContextTrimmed | None = None

        async def written() -> AsyncGenerator[AnyEvent, None]:
            nonlocal trimmed
            async with contextlib.aclosing(compact(self._conversation)) as events:
                async for event in events:
                    if isinstance(event, ContextTrimmed):
                        trimmed = event
                    else:
                        yield event

        finished = await self._answer(written())
        is_done = self._conversation.messages[-1].is_summary
        self._terminal.note(summarized(finished, trimmed) if is_done else "Stopped. The chat is unchanged.")
        return is_done

    async def _preset(self, name: str) -> None:
        from cpuchat.config.presets import find_preset, load_presets

        presets = await asyncio.to_thread(load_presets)
        if not name:
            self._terminal.line(", ".join(map(clean_line, presets)) or "There are no presets.")
        elif name == "none" and name not in presets:
            await self._conversation.preset.choose(None)
            self._terminal.note("No preset from the next answer on.")
        else:
            preset = await asyncio.to_thread(find_preset, name)
            await self._conversation.preset.choose(preset)
            self._terminal.note(f"Preset from the next answer on: {clean_line(preset.name)}.")
            if preset.model:
                await self._model(preset.model)

    async def _reasoning(self, choice: str) -> None:
        from cpuchat.chat_preset import reasoning_of

        if choice:
            await self._conversation.preset.set_reasoning(*reasoning_of(choice))
        used = self._conversation.chosen.chat
        self._terminal.note(f"From the next answer on: {reasoning(used.reasoning, used.reasoning_budget or None)}.")

    async def _figures(self, _: str) -> None:
        answers = [one for one in self._conversation.messages if one.timings is not None and not one.is_summary]
        if not answers or answers[-1].timings is None:
            self._terminal.note("No answer yet.")
        else:
            self._terminal.line(_words(full_summary(answers[-1].timings, answers[-1].stop_reason or "")))

    # A full context

    def _when_full(self, error: ContextFull) -> WhenFull:
        """Return what the chat does when it is full; ask if that is not known, "" if it was not answered.

        Raises:
            ContextFull: `error`, if nothing is done about it.
        """
        chat = self._conversation.chat
        choice = chat.when_full if chat is not None else "stop"
        if error.alone or not self._conversation.kept_all or choice == "stop":
            raise error
        if choice:
            return choice
        self._warn(error)
        choices = ", ".join(f"{number} {label.lower()}" for number, label in enumerate(WHEN_FULL.values(), 1))
        self._terminal.note(f"What should this chat do when the context is full? {choices}.")
        try:
            number = self._input("Number: ").strip()
        except (EOFError, KeyboardInterrupt):
            self._terminal.line()
            return ""
        return dict(enumerate(WHEN_FULL, 1)).get(int(number) if number.isdecimal() else 0, "")

    async def _context_full(self, choice: WhenFull) -> None:
        """Do what was chosen, and remember it; then answer the last message."""
        chat = self._conversation.chat
        if choice and chat is not None and chat.when_full != choice:
            await self._conversation.history.set_options(when_full=choice)
        if choice == "drop" or (choice == "compact" and await self._summarized()):
            await self._regenerate("")
        else:
            self._terminal.note("Not answered. /compact summarizes the chat; then /regenerate answers your message.")

    # Models

    async def _load(self, source: Source) -> None:
        from cpuchat.config import settings

        self._terminal.begin_waiting()
        self._terminal.note(f"Loading {clean_line(source.stem) or source}.")
        with self._session.interruptible():
            info = await self._session.load(source)
        self._loaded = source
        problem = self._conversation.draft_problem
        place = info.server or f"{info.n_threads} threads"
        context = f"context {info.n_ctx:,} tokens" if info.n_ctx else ""
        self._terminal.note(_words(clean_line(info.name), info.quantization, place, context))
        for note in filter(None, (problem, *info.notes)):
            self._terminal.note(note)
        try:
            await asyncio.to_thread(settings.update, {"model": {"last": str(source)}})
        except (CpuchatError, OSError) as error:  # a full disk: everything else works
            self._terminal.warn(f"Could not remember the model for the next start: {error}")

    async def _model(self, name: str) -> None:
        from cpuchat.config.servers import ServerModel, is_url

        if not name:
            raise UsageError("No model given.", "/models lists those on this machine.")
        source = ServerModel.of(name) if is_url(name) else await asyncio.to_thread(self._library.resolve, name)
        before = self._loaded
        try:
            await self._load(source)
        except CpuchatError as error:
            if before is None:
                raise
            self._warn(error)
            await self._load(before)

    async def _models(self, _: str) -> None:
        for model in await asyncio.to_thread(self._library.local_models):
            state = "damaged" if model.damaged else ""
            self._terminal.line(_words(clean_line(model.name), model.quantization, str(model.path), state))

    async def _help(self, _: str) -> None:
        for name, (about, _run) in self._commands.items():
            argument, colon, words = about.partition(": ")
            self._terminal.line(f"{name} {argument}: {words}" if colon else f"{name}: {about}")
        self._terminal.line(f"A message of many lines: {_MANY_LINES} on a line before and after it.")


def _words(*parts: str) -> str:
    """Join figures as a sentence reads them: a screen reader names every middle dot."""
    return ", ".join(filter(None, parts)).replace(" · ", ", ")
