"""Shows the events of a conversation on the chat screen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from cpuchat.base.errors import ChatsError, CpuchatError
from cpuchat.config.servers import Source
from cpuchat.conversation import Conversation
from cpuchat.present import answers
from cpuchat.protocol.messages import (
    AnyEvent,
    CallDone,
    CallsMade,
    ContextTrimmed,
    Failed,
    GenerationFinished,
    LoadCancelled,
    LoadProgress,
    ModelLoaded,
    PrefillProgress,
    Queued,
    Reconnecting,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.tui.chat.messages import last_turn, shown_steps
from cpuchat.tui.chat.reader import Reader
from cpuchat.tui.chat.status import WARNING_SHARE, StatusLine
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.markdown.drafted import Spans
from cpuchat.tui.markdown.transcript import TranscriptMessage

_TITLES = {
    "worker_died": "Worker crashed",
    "worker_stuck": "Worker ended",
    "does_not_fit": "Not enough memory",
    "server_unreachable": "Connection lost",
    "context_full": "Context full",
}
_WAITING = "Waiting for the first token…"
RUNNING = "running…"
MOST_COLORED = 100
"""Answers whose drafters are remembered while the app runs, the last ones."""
WARNING, ERROR, PLAIN = "warning", "error", "information"


class Answering:
    """Turns events into text and figures on the screen. Use it from the event loop; never raises for what a backend
    does.
    """

    def __init__(
        self,
        conversation: Conversation,
        transcript: ChatTranscript,
        status: StatusLine,
        reader: Reader,
        tell: Callable[[str, str], None],
        begun: Callable[[], None],
        show_messages: Callable[[], None],
        has_queue: Callable[[], bool],
    ) -> None:
        """Take the callbacks: `tell(text, severity)` shows a toast; `begun()` is called with the first event of a
        stream, `show_messages()` when the transcript must show the conversation's messages; while messages are queued
        (`has_queue()`), Esc is theirs.
        """
        self._conversation = conversation
        self._transcript = transcript
        self._status = status
        self._tell = tell
        self._begun = begun
        self._show_messages = show_messages
        self._has_queue = has_queue
        self._reader = reader
        self._replaces = False  # the answer is to take the place of something that is not shown any more
        self._open = False  # an answer is being written
        self._written = False  # its first text has come
        self._outdated = False  # the transcript has messages that the conversation has not
        self._to_read: list[str] | None = None  # its parts, without reasoning
        self._left_out = ""
        self._noted: set[str] = set()  # notes of models that were already shown
        self._warned: set[str] = set()  # chats whose context is almost full
        self.loading: str = ""  # name of the file that is being loaded
        self.spans: dict[int, Spans] = {}
        """Drafters of the parts of this run's answers, by message id."""

    @property
    def text_to_read(self) -> str | None:
        """Return the answer as far as it is written, without its reasoning; None when none is."""
        return None if self._to_read is None else "".join(self._to_read)

    @property
    def reading(self) -> bool:
        """Return whether something is being read aloud."""
        return self._reader.busy

    def silence(self) -> None:
        """Stop what is being read aloud."""
        self._reader.stop()

    async def load(self, path: Source) -> AnyEvent | None:
        """Load a model and return the last event: `ModelLoaded` when it is ready."""
        self.loading = path.stem
        self._status.show_state(f"loading {self.loading}")
        try:
            last = await self._consume(lambda: self._conversation.load_model(path))
        finally:
            self.loading = ""
            self._status.show_state("")
            self._status.show_model(self._conversation.model)
        if isinstance(last, LoadCancelled):
            self._tell("Load stopped. Your next message restarts it.", PLAIN)
        if isinstance(last, ModelLoaded) and (problem := self._conversation.draft_problem):
            self._tell(problem, ERROR)
        return last

    def model_changed(self) -> None:
        """Show the model that something else has loaded or unloaded."""
        model = self._conversation.model
        self._status.show_model(model)
        if model is not None:
            self._show_notes(model)
        self.show_context()

    async def answer(
        self, stream: Callable[[], AsyncIterator[AnyEvent]], replaces: bool = False, continues: bool = False
    ) -> AnyEvent | None:
        """Show one answer and return its last event.

        What it `replaces` is shown again when it ends before its first token. `continues`: it is the end of the last
        one.
        """
        drafted = bool(self._conversation.speculation.drafters)
        model = self._conversation.model
        hint = "F10 answers now" if model is not None and not model.server else ""
        begin = self._transcript.reopen_answer if continues else self._transcript.begin_answer
        begin(self._conversation.model_name or "Answer", drafted, hint)
        self._transcript.set_pending(_WAITING)
        self._open, self._written, self._outdated, self._replaces = True, False, False, replaces
        self._left_out = ""
        self._to_read = []
        try:
            await self._reader.begin_answer()
            return await self._consume(stream)
        finally:
            self._to_read = None
            self._reader.end_answer()
            if self._open:  # ended without a final event
                self._close("stopped")
            self._status.show_state("")
            self._status.show_model(self._conversation.model)
            self.show_context()

    async def _consume(self, stream: Callable[[], AsyncIterator[AnyEvent]]) -> AnyEvent | None:
        last: AnyEvent | None = None
        try:
            async for event in stream():
                if last is None:
                    self._begun()
                last = event
                self._show(event)
        except CpuchatError as error:
            self._outdated = self._open and (last is None or isinstance(error, ChatsError))  # not sent, or loaded again
            last = Failed(code=error.code, message=error.message, hint=error.hint)
            self._show(last)
        return last

    def _show(self, event: AnyEvent) -> None:
        match event:
            case TextDelta():
                if not self._written:
                    self._written = True
                    self._transcript.set_pending("")
                self._transcript.append(event.text, event.channel, event.drafter)
                if event.channel == "answer" and self._to_read is not None:
                    self._to_read.append(event.text)
                    self._reader.feed(event.text)
            case PrefillProgress():
                if not self._written:
                    left = self._conversation.meter.prefill_left_s
                    self._transcript.set_pending(answers.prefill_progress(event, left))
            case LoadProgress():
                remote = event.phase in answers.SERVER_PHASES
                name = self.loading or ("the server" if remote else "the model")
                state = answers.load_progress(name, event, skips=not self._has_queue())
                self._status.show_state(state)
                if self._open:  # a dead worker is started again before it answers
                    self._transcript.set_pending(state if remote else "Restarting the worker…")
            case Reconnecting():
                self._transcript.set_pending(answers.reconnecting(event))
            case Queued():
                if not self._written:
                    self._transcript.set_pending(answers.queued(event))
            case ModelLoaded():
                self._status.show_state("")
                self._status.show_model(event.model)
                self._show_notes(event.model)
            case ContextTrimmed():
                self._left_out = answers.left_out(event)
                self._tell(answers.context_trimmed(event), WARNING)
            case GenerationFinished() if event.calls and event.stop_reason != "cancelled":
                pass  # it goes on after them
            case CallsMade() | CallDone():
                steps = self._conversation.history.answer.steps
                is_done = len(steps[-1].results) == len(steps[-1].calls)
                self.show_call(RUNNING)
                self._written = False
                self._transcript.set_pending(_WAITING if is_done else "")
            case GenerationFinished():
                answer = self._conversation.history.answer
                note = answers.summary(event.timings, event.stop_reason, answer.sampling, answer.default_sampling)
                is_empty = event.stop_reason == "cancelled" and not (answer.content or answer.reasoning or answer.steps)
                self._close(" · ".join(filter(None, (note, event.note, self._left_out))))
                if is_empty:
                    self._show_messages()  # without the empty answer
                    self._tell("The request was stopped before the first token.", "information")
                if note := answers.note(event.timings):
                    self._tell(note, WARNING)
                self._reader.answered(event.timings)
            case Failed():
                self._close("")
                if self._outdated:
                    self._show_messages()
                self._fail(event)
            case _:
                pass

    def show_call(self, state: str) -> None:
        """Show the state of the call that is next."""
        steps = self._conversation.history.answer.steps
        self._transcript.show_steps(shown_steps(steps, current=state))

    def _close(self, note: str) -> None:
        if self._open:
            self._open = False
            self._transcript.set_pending("")
            answer = self._transcript.finish_answer(note)
            messages = self._conversation.messages
            if answer is not None and messages and messages[-1].role == "assistant":
                # Also when it has none: the id may be that of an answer that was deleted.
                self.spans[messages[-1].id] = answer.spans
                if len(self.spans) > MOST_COLORED:  # a drafted answer has hundreds
                    del self.spans[next(iter(self.spans))]
            if self._replaces and not self._written:
                self._show_messages()
            else:
                for message in last_turn(messages, self._conversation.history.tree):
                    self._transcript.identify(message)

    def _fail(self, event: Failed) -> None:
        title = _TITLES.get(event.code, "Request failed")
        self._transcript.add_message(TranscriptMessage(role="notice", title=title, content=answers.failure(event)))

    def _show_notes(self, model: ModelInfo) -> None:
        for note in model.notes:
            if f"{model.path}\0{note}" not in self._noted:
                self._noted.add(f"{model.path}\0{note}")
                self._tell(note, WARNING)

    def show_context(self) -> None:
        """Show how full the context is; warn once that it is almost full."""
        used, model, chat = (
            self._conversation.figures().n_past.value or 0,
            self._conversation.model,
            self._conversation.chat,
        )
        self._status.show_context(used)
        if model is None or chat is None or not (used and model.n_ctx):
            return
        if used < WARNING_SHARE * model.n_ctx:
            self._warned.discard(chat.id)  # it may have been summarized
        elif chat.id not in self._warned:
            self._warned.add(chat.id)
            self._tell(f"The context is {100 * used / model.n_ctx:.0f} % full. /compact summarizes the chat.", WARNING)
