"""The chat as lines of text, for screen readers and terminals that cannot draw: nothing is ever redrawn."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from cpuchat.backend.switching import SwitchingBackend
from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, Interrupted, UsageError
from cpuchat.base.text import clean_line
from cpuchat.chats.records import Chat, StoredMessage, WhenFull
from cpuchat.chats.store import ChatStore
from cpuchat.chats.transfer import export_chat
from cpuchat.cli.app import opening
from cpuchat.cli.lines import MANY_LINES, Lines
from cpuchat.cli.options import keeping_backend
from cpuchat.cli.output import error_text, write_output
from cpuchat.cli.session import each_interrupt, error_of, show_state
from cpuchat.cli.terminal import Phrases, TerminalOutput, is_terminal
from cpuchat.cli.tools import start_tools, tool_loop
from cpuchat.config import settings
from cpuchat.config.presets import find_preset, load_presets
from cpuchat.config.servers import Source
from cpuchat.present import answers as words
from cpuchat.present.chats import document, when
from cpuchat.present.tools import title
from cpuchat.protocol.messages import AnyEvent, CallDone, CallsMade, Failed, GenerationFinished, ModelLoaded, TextDelta
from cpuchat.session import events
from cpuchat.session.activity import Activity
from cpuchat.session.attachments import attach, start_folder
from cpuchat.session.chat import ChatSession
from cpuchat.session.conversation import Conversation
from cpuchat.session.events import Outgoing, SessionEvent

_MAX_CHATS = 20
T = TypeVar("T")


def open_plain(model: str | None, values: Mapping[str, Any], *, server: str | None = None) -> int:
    """Run the chat until it is left; arguments and errors as `app.open_app`, but it needs no terminal."""
    chosen, library, initial, keys = opening(model, values, server)
    terminal = TerminalOutput(plain=True, show_reasoning=chosen.ui.show_reasoning)
    backend = SwitchingBackend(keeping_backend(chosen), keys)
    core = Conversation(settings=chosen, backend=backend, store=ChatStore(paths.chats_db()), library=library)
    core.asks_when_full = is_terminal(sys.stdin)
    with asyncio.Runner() as runner:
        try:
            chat = PlainChat(ChatSession(core), terminal, runner)
            folder, names = values.get("tools_folder"), values.get("tool_servers", ())
            runner.run(start_tools(tool_loop(folder, names, terminal, chat.lines.reply), core, terminal))
            return chat.run(initial)
        finally:
            runner.run(core.close())


class PlainChat:
    """Reads lines, and answers them. The loop of `runner` runs only meanwhile, so that Ctrl+C reaches `input`.

    `do_…` are the commands; their docstrings, what `/help` says: the argument, and what they do.
    """

    def __init__(self, chat: ChatSession, terminal: TerminalOutput, runner: asyncio.Runner) -> None:
        self._chat, self._terminal, self._do = chat, terminal, runner.run
        chat.no_model = "No model is loaded. /model NAME loads one."
        chat.listen = self._show
        self.lines = Lines(terminal, self._answer_now)
        self._phrases: Phrases | None = None  # of the answer that is being written
        self._problem: CpuchatError | None = None  # why the last model was not loaded
        self._presses = 0  # of Ctrl+C
        self._working: asyncio.Future[None] | None = None  # held while it runs
        self._listed: list[Chat] = []
        self._is_over = False

    def run(self, initial: Source) -> int:
        """Chat until /quit or the end of the input; returns the exit code."""
        self._do(self._settle(self._load(initial)))
        if not self._chat.loaded:
            return (self._problem or Interrupted).exit_code
        self._terminal.note("Type a message and press Enter. /help lists commands. Ctrl+C stops, Ctrl+D quits.")
        while not self._is_over and (text := self.lines.next_message()) is not None:
            try:
                self._do(self._settle(self._act(text.strip())))
                if self._chat.activity is Activity.AWAITING_ROOM:
                    self._do(self._settle(self._chat.choose_when_full(self._ask_when_full())))
            except CpuchatError as error:
                self._terminal.warn(error_text(error))
        return 0

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
        with each_interrupt(self._interrupt), self.lines.reading():
            await self._chat.settled()
        self._presses = 0

    def _interrupt(self, presses: int) -> None:
        self._presses = presses
        if presses > 1:
            self._chat.kill()
        self._working = asyncio.ensure_future(self._chat.stop())

    # Events of the session

    def _show(self, event: SessionEvent) -> None:
        phrases, note = self._phrases, self._terminal.note
        match event:
            case events.Notice():
                note(event.text)
            case events.LoadBegun():
                self._terminal.begin_waiting()
                note(f"Loading {clean_line(event.source.stem) or event.source}.")
            case events.LoadEnded():
                self._end_load(event)
            case events.AnswerBegun():
                self._begin_answer()
            case TextDelta() if phrases is not None:
                (phrases.reasoning if event.channel == "reasoning" else phrases.answer)(event.text)
            case CallsMade() if phrases is not None:
                if event.said:  # what is said after them is a paragraph of its own
                    phrases.answer("\n\n")
                show_state(event, self._terminal)
            case events.AnswerEnded() if not isinstance(event.last, Failed):
                self._end_answer(event.last)
            case events.SummaryEnded(problem=Failed() as problem):
                self._fail(problem)
            case events.SummaryEnded():
                self._end_answer(event.finished)
                done = words.summarized(event.finished, event.trimmed) if event.finished else ""
                note(done if event.is_kept else "Stopped. The chat is unchanged.")
            case Failed():
                self._fail(event)
            case _:
                show_state(event, self._terminal, self._chat.conversation.meter.prefill_left_s)

    def _end_load(self, event: events.LoadEnded) -> None:
        if not isinstance(event.last, ModelLoaded):
            if not isinstance(event.last, Failed):
                self._terminal.note("Load stopped.")
            return
        model = event.last.model
        place = model.server or f"{model.n_threads} threads"
        context = f"context {model.n_ctx:,} tokens" if model.n_ctx else ""
        self._terminal.note(_words(clean_line(model.name), model.quantization, place, context))
        for note in filter(None, (self._chat.conversation.draft_problem, *model.notes)):
            self._terminal.note(note)
        try:
            settings.update({"model": {"last": str(event.source)}})
        except (CpuchatError, OSError) as error:  # a full disk: everything else works
            self._terminal.warn(f"Could not remember the model for the next start: {error}")

    def _begin_answer(self) -> None:
        core = self._chat.conversation
        can_end = is_terminal(sys.stdin) and core.model is not None and not core.model.server
        hint = "Enter answers now." if can_end else ""
        self._phrases = Phrases(self._terminal, core.model_name, core.settings.ui.show_reasoning, hint)
        self._terminal.begin_waiting()

    def _finish_phrases(self) -> None:
        if self._phrases is not None:
            self._phrases.finish()
            self._phrases = None
            self._terminal.end_answer()

    def _end_answer(self, last: AnyEvent | None) -> None:
        self._finish_phrases()
        if not isinstance(last, GenerationFinished):
            when = "during a tool call" if isinstance(last, CallDone) else "before the first token"
            self._terminal.warn(error_text(Interrupted(f"Stopped {when}.")))
            return
        self._terminal.note(_words(words.summary(last.timings, last.stop_reason), last.note))
        if note := words.note(last.timings):
            self._terminal.note(note)
        if self._chat.history.unsaved is not None:
            self._terminal.warn(f"The answer could not be saved. {self._chat.history.save_problem}")

    def _fail(self, failed: Failed) -> None:
        """Say what failed, unless the chat makes room for the question that failed."""
        self._finish_phrases()
        if not self._chat.makes_room(failed):
            self._problem = error_of(failed, is_interrupted=self._presses > 0)
            self._terminal.warn(error_text(self._problem))

    # Answers

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

    def _answer_now(self) -> None:
        if self._phrases is not None and self._phrases.is_reasoning:
            self._working = asyncio.ensure_future(self._chat.answer_now())

    def _ask_when_full(self) -> WhenFull:
        """Return what the user wants a full chat to do; "" if that was not answered."""
        choices = ", ".join(f"{number} {label.lower()}" for number, label in enumerate(words.WHEN_FULL.values(), 1))
        self._terminal.note(f"What should this chat do when the context is full? {choices}.")
        try:
            number = self.lines.typed_now("Number: ").strip()
        except (EOFError, KeyboardInterrupt):
            self._terminal.line()
            return ""
        return dict(enumerate(words.WHEN_FULL, 1)).get(int(number) if number.isdecimal() else 0, "")

    async def do_preset(self, name: str) -> None:
        """NAME: use a preset from the next answer on, or none; without a name, list them."""
        presets = await asyncio.to_thread(load_presets)
        if not name:
            self._terminal.line(", ".join(map(clean_line, presets)) or "There are no presets.")
        else:
            is_none = name == "none" and name not in presets
            await self._chat.use_preset(None if is_none else await asyncio.to_thread(find_preset, name))

    async def do_reasoning(self, choice: str) -> None:
        """CHOICE: how the model reasons in this chat: on, off, default, or a number of tokens at most."""
        if choice:
            await self._chat.set_reasoning(choice)
        used = self._chat.conversation.chosen.chat
        reasoning = words.reasoning(used.reasoning, used.reasoning_budget or None)
        self._terminal.note(f"From the next answer on: {reasoning}.")

    async def do_figures(self, _: str) -> None:
        """Show all figures of the last answer."""
        answers = [one for one in self._chat.messages if one.timings is not None and not one.is_summary]
        if not answers or answers[-1].timings is None:
            self._terminal.note("No answer yet.")
        else:
            self._terminal.line(_words(words.full_summary(answers[-1].timings, answers[-1].stop_reason or "")))

    # Models

    async def _load(self, source: Source) -> None:
        self._chat.load(source)

    async def do_model(self, name: str) -> None:
        """NAME: load a model: a file, a repository or the address of a server."""
        if not name:
            raise UsageError("No model given.", "/models lists those on this machine.")
        await self._load(await asyncio.to_thread(self._chat.find_model, name))

    async def do_models(self, _: str) -> None:
        """List the models on this machine."""
        library = self._chat.conversation.library
        for model in await asyncio.to_thread(library.local_models) if library is not None else ():
            self._terminal.line(_words(clean_line(model.name), model.quantization, str(model.path), model.state))

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

    # Chats

    def _open_chat(self) -> Chat:
        """Return the open chat. Raises UsageError if it has no messages yet."""
        if (chat := self._chat.conversation.chat) is None:
            raise UsageError("This chat has no messages yet.")
        return chat

    async def do_new(self, _: str) -> None:
        """Start a new chat."""
        self._chat.new()
        self._terminal.note("New chat.")

    async def do_chats(self, query: str) -> None:
        """WORDS: list the last chats, or those that have these words."""
        found = await self._chat.history.list_chats(query)
        self._listed = [one for one in found if not one.sides][:_MAX_CHATS]
        for number, chat in enumerate(self._listed, 1):
            self._terminal.line(f"{number}. {clean_line(chat.title) or 'New chat'}, {when(chat.updated)}")
        if not self._listed:
            self._terminal.note("No chats match." if query else "No chats yet.")

    async def do_open(self, number: str) -> None:
        """N: open chat N of that list."""
        chat = _numbered(self._listed, number, "chat", "/chats lists them by number.")
        await self._chat.open(chat.id)
        self._print_last()

    async def do_history(self, _: str) -> None:
        """Print the open chat."""
        for message in self._chat.messages:
            self._print(message)

    async def do_branch(self, number: str) -> None:
        """N: show answer N where the last one has several."""
        if not (branching := self._chat.branching):
            self._terminal.note("No other answer here. /regenerate or /edit makes one.")
            return
        siblings = self._chat.history.tree.siblings(branching[-1].id)
        chosen = _numbered(siblings, number, "answer", f"There are {len(siblings)}: /branch 1.")
        await self._chat.open(self._open_chat().id, chosen)
        self._print_last()

    async def do_fork(self, _: str) -> None:
        """Copy the open branch into a new chat, and open that."""
        await self._chat.fork()

    async def do_export(self, name: str) -> None:
        """FILE: write the open chat to a file, as Markdown (.md) or JSON."""
        store, chat, file = self._chat.history.store, self._open_chat(), paths.expanded(name)
        if not name:
            raise UsageError("No file given.", "/export chat.md writes Markdown, /export chat.json everything.")
        exported = await asyncio.to_thread(lambda: document([export_chat(store, store.chat(chat.id))], file))
        await asyncio.to_thread(write_output, file, exported)
        self._terminal.note(f"Exported to {paths.shown(file)}.")

    async def do_delete(self, _: str) -> None:
        """Delete the open chat."""
        await self._chat.delete(self._open_chat().id)
        self._terminal.note("Deleted. /undo puts it back, until you quit.")

    async def do_undo(self, _: str) -> None:
        """Put back what was deleted last."""
        if deleted := await self._chat.undo():
            await self._chat.open(deleted.chat_id, deleted.message_id)
            self._terminal.note("Put back and opened.")

    def _print_last(self) -> None:
        for message in self._chat.messages[-2:]:
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


def _words(*parts: str) -> str:
    """Join figures as a sentence reads them: a screen reader names every middle dot."""
    return ", ".join(filter(None, parts)).replace(" · ", ", ")


def _numbered(listed: Sequence[T], number: str, what: str, hint: str) -> T:
    """Return one of what was listed by its number, from 1. Raises UsageError: there is none."""
    if not number.isdecimal() or not 0 < int(number) <= len(listed):
        raise UsageError(f"No {what} {clean_line(number) or 'given'}.", hint)
    return listed[int(number) - 1]
