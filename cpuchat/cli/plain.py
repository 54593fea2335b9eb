"""The chat as lines of text, for screen readers and terminals that cannot draw: nothing is ever redrawn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, Interrupted, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.output import error_text, write_output
from cpuchat.cli.terminal import Phrases, Terminal, is_terminal
from cpuchat.present import answers as words
from cpuchat.present.tools import title

if TYPE_CHECKING:
    from cpuchat.chats.history import Attach
    from cpuchat.chats.records import Chat, StoredMessage, WhenFull
    from cpuchat.cli.session import Session
    from cpuchat.config.servers import Source
    from cpuchat.protocol.messages import Failed, GenerationFinished
    from cpuchat.session.chat import ChatSession
    from cpuchat.session.events import SessionEvent

Commands = dict[str, tuple[str, Callable[[str], Coroutine[Any, Any, None]]]]
"""By name: what `/help` says, and what runs it with the rest of the line."""
_MANY_LINES = '"""'
_MOST_CHATS = 20


def open_plain(model: str | None, values: Mapping[str, Any], *, server: str | None = None) -> int:
    """Run the chat until it is left; arguments and errors as `app.open_app`, but it needs no terminal."""
    from cpuchat.backend.switching import SwitchingBackend
    from cpuchat.chats.store import ChatStore
    from cpuchat.cli.app import opening
    from cpuchat.cli.options import keeping_backend
    from cpuchat.cli.session import Session
    from cpuchat.cli.tools import start_tools, tool_loop
    from cpuchat.session.chat import ChatSession

    chosen, library, initial, keys = opening(model, values, server)
    terminal = Terminal(plain=True, show_reasoning=chosen.ui.show_reasoning)
    backend = SwitchingBackend(keeping_backend(chosen), keys)
    session = Session(chosen, terminal, backend, ChatStore(paths.chats_db()))
    session.conversation.library = library
    session.conversation.asks_when_full = is_terminal(sys.stdin)
    with asyncio.Runner() as runner:
        try:
            chat = PlainChat(ChatSession(session.conversation), session, terminal, runner)
            folder, names = values.get("tools_folder"), values.get("tool_servers", ())
            runner.run(start_tools(tool_loop(folder, names, terminal, chat.typed.line), session, terminal))
            return chat.run(initial)
        finally:
            runner.run(session.conversation.close())


class PlainChat:
    """Reads lines, and answers them. The loop of `runner` runs only meanwhile, so that Ctrl+C reaches `input`."""

    def __init__(self, chat: ChatSession, session: Session, terminal: Terminal, runner: asyncio.Runner) -> None:
        self._chat, self._session, self._terminal, self._do = chat, session, terminal, runner.run
        self._conversation = chat.conversation
        chat.no_model = "No model is loaded. /model NAME loads one."
        chat.listen = self._show
        self.typed = TypedAhead(self._answer_now)
        self._phrases: Phrases | None = None  # of the answer that is being written
        self._problem: CpuchatError | None = None  # why the last model was not loaded
        self._is_ready = False  # the first model is loaded
        self._ending: asyncio.Task[None] | None = None
        self._listed: list[Chat] = []
        self._commands: Commands = {
            "/help": ("list the commands", self._help),
            "/new": ("start a new chat", self._new),
            "/chats": ("WORDS: list the last chats, or those that have these words", self._chats),
            "/open": ("N: open chat N of that list", self._open),
            "/history": ("print the open chat", self._history),
            "/branch": ("N: show answer N where the last one has several", self._branch),
            "/fork": ("copy the open branch into a new chat, and open that", self._fork),
            "/export": ("FILE: write the open chat to a file, as Markdown (.md) or JSON", self._export),
            "/delete": ("delete the open chat", self._delete),
            "/undo": ("put back what was deleted last", self._undo),
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
        if self._problem is not None:
            raise self._problem
        self._is_ready = True
        self._terminal.note("Type a message and press Enter. /help lists commands. Ctrl+C stops, Ctrl+D quits.")
        while (text := self._read()) is not None:
            if text.strip().partition(" ")[0] == "/quit":
                return 0
            try:
                self._run(text)
                if self._chat.state == "asking":
                    self._do(self._choose_when_full(self._ask_when_full()))
            except CpuchatError as error:
                self._warn(error)
        return 0

    def _run(self, text: str) -> None:
        command, _, rest = text.strip().partition(" ")
        if command in self._commands:
            self._do(self._commands[command][1](rest.strip()))
        elif command.startswith("/") and "/" not in command[1:]:
            self._terminal.warn(f"No such command: {clean_line(command)}. /help lists them.")
        elif command:
            self._do(self._send(text.strip()))

    def _warn(self, error: CpuchatError) -> None:
        self._terminal.warn(error_text(error))

    async def _settle(self, *, reads: bool = True) -> None:
        """Wait until nothing runs; Ctrl+C stops it. `reads`: lines that are typed meanwhile are next."""
        with self._session.interruptible(), self.typed.reading() if reads else contextlib.nullcontext():
            await self._chat.settled()

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

    # Events of the session

    def _show(self, event: SessionEvent) -> None:
        from cpuchat.protocol.messages import Failed, ModelLoaded
        from cpuchat.session import events

        match event:
            case events.Notice():
                self._terminal.note(event.text)
            case events.LoadBegun():
                self._terminal.begin_waiting()
                self._terminal.note(f"Loading {clean_line(event.source.stem) or event.source}.")
            case events.LoadEnded(last=ModelLoaded(model=model)):
                place = model.server or f"{model.n_threads} threads"
                context = f"context {model.n_ctx:,} tokens" if model.n_ctx else ""
                self._terminal.note(_words(clean_line(model.name), model.quantization, place, context))
                for note in filter(None, (self._conversation.draft_problem, *model.notes)):
                    self._terminal.note(note)
            case events.AnswerBegun():
                self._begin_answer()
            case events.AnswerEnded():
                if not isinstance(event.last, Failed):
                    self._end_answer(self._session.answer.finished)
            case events.SummaryEnded():
                if event.problem is not None:
                    self._fail(event.problem)
                else:
                    self._end_answer(event.finished)
                    done = words.summarized(event.finished, event.trimmed) if event.finished else ""
                    self._terminal.note(done if event.is_kept else "Stopped. The chat is unchanged.")
            case events.NotAnswered():
                again = "/compact summarizes the chat; then /regenerate answers your message."
                self._terminal.note(f"Not answered. {again}")
            case Failed():
                self._fail(event)
            case _:
                self._session.show(event)

    def _begin_answer(self) -> None:
        model, shows = self._conversation.model, self._conversation.settings.ui.show_reasoning
        can_end = is_terminal(sys.stdin) and model is not None and not model.server
        hint = "Enter answers now." if can_end else ""
        self._phrases = Phrases(self._terminal, self._conversation.model_name, shows, hint)
        self._session.begin_answer(self._phrases)
        self._terminal.begin_waiting()

    def _finish_phrases(self) -> None:
        if self._phrases is not None:
            self._phrases.finish()
            self._phrases = None
            self._terminal.end_answer()

    def _end_answer(self, finished: GenerationFinished | None) -> None:
        self._finish_phrases()
        if finished is None:
            self._warn(Interrupted(self._session.stopped))
            return
        self._terminal.note(_words(words.summary(finished.timings, finished.stop_reason), finished.note))
        if note := words.note(finished.timings):
            self._terminal.note(note)
        if self._conversation.history.unsaved is not None:
            self._terminal.warn(f"The answer could not be saved. {self._conversation.history.save_problem}")

    def _fail(self, failed: Failed) -> None:
        """Say what failed, unless the chat makes room for the question that failed."""
        self._finish_phrases()
        if not self._chat.makes_room(failed):
            self._problem = self._session.error(failed)
            if self._is_ready:
                self._warn(self._problem)

    # Answers

    async def _send(self, text: str, editing: int | None = None) -> None:
        from cpuchat.session.events import Outgoing

        self._chat.submit(Outgoing(text, await self._attached(text), editing))
        await self._settle()

    async def _edit(self, text: str) -> None:
        if not text:
            raise UsageError("No text given.", "Type it after /edit.")
        await self._send(text, editing=0)

    async def _attached(self, text: str) -> Attach:
        from cpuchat.session.attachments import attach, start_folder

        sent = await asyncio.to_thread(attach, text, start_folder())
        if sent:
            self._terminal.note(f"Attached: {', '.join(clean_line(one.title) for one in sent)}.")
        return lambda: sent

    async def _regenerate(self, _: str) -> None:
        self._chat.regenerate()
        await self._settle()

    async def _compact(self, _: str) -> None:
        self._chat.summarize()
        await self._settle()

    def _answer_now(self) -> None:
        if self._phrases is not None and self._phrases.is_reasoning:
            self._ending = asyncio.ensure_future(self._end_reasoning())

    async def _end_reasoning(self) -> None:
        if not await self._conversation.end_reasoning():
            self._terminal.note("The server cannot end the reasoning. Ctrl+C stops the answer.")

    def _ask_when_full(self) -> WhenFull:
        """Return what the user wants a full chat to do; "" if that was not answered."""
        choices = ", ".join(f"{number} {label.lower()}" for number, label in enumerate(words.WHEN_FULL.values(), 1))
        self._terminal.note(f"What should this chat do when the context is full? {choices}.")
        try:
            number = self._input("Number: ").strip()
        except (EOFError, KeyboardInterrupt):
            self._terminal.line()
            return ""
        return dict(enumerate(words.WHEN_FULL, 1)).get(int(number) if number.isdecimal() else 0, "")

    async def _choose_when_full(self, choice: WhenFull) -> None:
        await self._chat.choose_when_full(choice)
        await self._settle()

    async def _preset(self, name: str) -> None:
        from cpuchat.config.presets import find_preset, load_presets

        presets = await asyncio.to_thread(load_presets)
        if not name:
            self._terminal.line(", ".join(map(clean_line, presets)) or "There are no presets.")
        else:
            is_none = name == "none" and name not in presets
            before = self._chat.loaded_source
            await self._chat.use_preset(None if is_none else await asyncio.to_thread(find_preset, name))
            if self._chat.busy:
                await self._finish_load(before)

    async def _reasoning(self, choice: str) -> None:
        if choice:
            await self._chat.set_reasoning(choice)
        used = self._conversation.chosen.chat
        reasoning = words.reasoning(used.reasoning, used.reasoning_budget or None)
        self._terminal.note(f"From the next answer on: {reasoning}.")

    async def _figures(self, _: str) -> None:
        answers = [one for one in self._conversation.messages if one.timings is not None and not one.is_summary]
        if not answers or answers[-1].timings is None:
            self._terminal.note("No answer yet.")
        else:
            self._terminal.line(_words(words.full_summary(answers[-1].timings, answers[-1].stop_reason or "")))

    # Models

    async def _load(self, source: Source) -> None:
        before = self._chat.loaded_source
        self._chat.load(source)
        await self._finish_load(before)

    async def _finish_load(self, before: Source | None) -> None:
        """Wait for a load and remember the model; if the load was stopped, load the model `before` again."""
        from cpuchat.config import settings

        self._problem = None
        await self._settle(reads=False)
        if not self._chat.loaded and self._problem is None:
            self._problem = Interrupted("Stopped before the model was loaded.")
            if before is not None:
                self._warn(self._problem)
                self._chat.load(before)
                await self._settle(reads=False)
        if self._chat.loaded:
            try:
                await asyncio.to_thread(settings.update, {"model": {"last": str(self._chat.source)}})
            except (CpuchatError, OSError) as error:  # a full disk: everything else works
                self._terminal.warn(f"Could not remember the model for the next start: {error}")

    async def _model(self, name: str) -> None:
        if not name:
            raise UsageError("No model given.", "/models lists those on this machine.")
        await self._load(await asyncio.to_thread(self._chat.find_model, name))

    async def _models(self, _: str) -> None:
        library = self._conversation.library
        for model in await asyncio.to_thread(library.local_models) if library is not None else ():
            self._terminal.line(_words(clean_line(model.name), model.quantization, str(model.path), model.state))

    async def _help(self, _: str) -> None:
        for name, (about, _run) in self._commands.items():
            argument, colon, text = about.partition(": ")
            self._terminal.line(f"{name} {argument}: {text}" if colon else f"{name}: {about}")
        self._terminal.line(f"A message of many lines: {_MANY_LINES} on a line before and after it.")

    # Chats

    def _require_chat(self) -> Chat:
        """Return the open chat. Raises UsageError if it has no messages yet."""
        if (chat := self._conversation.chat) is None:
            raise UsageError("This chat has no messages yet.")
        return chat

    async def _new(self, _: str) -> None:
        self._chat.new_chat()
        self._terminal.note("New chat.")

    async def _chats(self, words: str) -> None:
        from cpuchat.present.chats import when

        found = await self._conversation.history.list_chats(words)
        self._listed = [one for one in found if not one.sides][:_MOST_CHATS]
        for number, chat in enumerate(self._listed, 1):
            self._terminal.line(f"{number}. {clean_line(chat.title) or 'New chat'}, {when(chat.updated)}")
        if not self._listed:
            self._terminal.note("No chats match." if words else "No chats yet.")

    async def _open(self, number: str) -> None:
        if not number.isdecimal() or not 0 < int(number) <= len(self._listed):
            raise UsageError(f"No chat {clean_line(number) or 'given'}.", "/chats lists them by number.")
        await self._chat.open_chat(self._listed[int(number) - 1].id)
        self._print_last()

    async def _history(self, _: str) -> None:
        for message in self._conversation.messages:
            self._print(message)

    async def _branch(self, number: str) -> None:
        siblings = self._conversation.history.tree.siblings
        found = [one for message in self._conversation.messages if len(one := siblings(message.id)) > 1]
        if not found:
            self._terminal.note("No other answer here. /regenerate or /edit makes one.")
            return
        if not number.isdecimal() or not 0 < int(number) <= len(found[-1]):
            raise UsageError(f"No answer {clean_line(number) or 'given'}.", f"There are {len(found[-1])}: /branch 1.")
        await self._chat.open_chat(self._require_chat().id, found[-1][int(number) - 1])
        self._print_last()

    async def _fork(self, _: str) -> None:
        self._require_chat()
        await self._conversation.fork_chat(self._conversation.messages[-1].id)
        self._terminal.note("Forked. The copy is open now.")

    async def _export(self, name: str) -> None:
        from cpuchat.base.paths import expanded, shown
        from cpuchat.chats.transfer import export_chat
        from cpuchat.present.chats import document

        history, file = self._conversation.history, expanded(name)
        if not name:
            raise UsageError("No file given.", "/export chat.md writes Markdown, /export chat.json everything.")

        def write() -> None:
            write_output(file, document([export_chat(history.store, history.store.chat(chat_id))], file))

        chat_id = self._require_chat().id
        await asyncio.to_thread(write)
        self._terminal.note(f"Exported to {shown(file)}.")

    async def _delete(self, _: str) -> None:
        await self._conversation.delete_chat(self._require_chat().id)
        self._terminal.note("Deleted. /undo puts it back, until you quit.")

    async def _undo(self, _: str) -> None:
        if (deleted := await self._conversation.history.undo_delete()) is None:
            self._terminal.note("Nothing to undo.")
        else:
            await self._chat.open_chat(deleted.chat_id, deleted.message_id)
            self._terminal.note("Put back and opened.")

    def _print_last(self) -> None:
        for message in self._conversation.messages[-2:]:
            self._print(message)

    def _print(self, message: StoredMessage) -> None:
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


class TypedAhead:
    """`lines` are those with a text; `ended` that Ctrl+D was pressed. `on_empty` is called with each empty line."""

    def __init__(self, on_empty: Callable[[], None]) -> None:
        self.lines: deque[str] = deque()
        self.ended = False
        self._on_empty = on_empty
        self._asked: asyncio.Future[str] | None = None

    async def line(self) -> str:
        """Return the next line, "" at the end of the input: the answer to a question. Use while `reading`."""
        self._asked = asyncio.get_running_loop().create_future()
        try:
            return "" if self.ended else await self._asked
        finally:
            self._asked = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read meanwhile, if standard input is a terminal: a pipe has the next messages. Use from the event loop."""
        if not is_terminal(sys.stdin):
            yield
            return
        loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
        loop.add_reader(terminal, self._read, terminal)
        try:
            yield
        finally:
            loop.remove_reader(terminal)

    def _read(self, terminal: int) -> None:
        try:
            found = os.read(terminal, 1 << 16)
        except OSError:  # hung up
            found = b""
        if not found:
            self.ended = True
            asyncio.get_running_loop().remove_reader(terminal)
        for line in found.decode("utf-8", "surrogateescape").splitlines() or [""] * self.ended:
            if self._asked is not None and not self._asked.done():
                self._asked.set_result(line)
            elif line.strip():
                self.lines.append(line)
            elif not self.ended:
                self._on_empty()


def _words(*parts: str) -> str:
    """Join figures as a sentence reads them: a screen reader names every middle dot."""
    return ", ".join(filter(None, parts)).replace(" · ", ", ")
