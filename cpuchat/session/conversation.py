"""The headless core of a chat: history, backend, store and meter together.

The terminal app, the command line and benchmarks use it alike. Each request is an async stream of events; while it is
consumed, the history grows, the store is saved at least every half second, and the meter follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from cpuchat.backend.base import Backend
from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.processes import stop_job
from cpuchat.chats.history import Attach, ChatHistory, request_messages
from cpuchat.chats.records import AnswerSettings, Chat, StoredMessage
from cpuchat.chats.saving import UNSAVED
from cpuchat.config.servers import ServerModel, Source
from cpuchat.config.settings import Settings
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.gguf.header import known_as
from cpuchat.models.library import usage
from cpuchat.models.library.library import Library
from cpuchat.models.machine import Tuned, find_tuned, reach_of
from cpuchat.protocol.messages import (
    AnyEvent,
    CallDone,
    CallsMade,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    Measure,
    Measured,
    Message,
    ModelLoaded,
    Output,
    Sampling,
    Speculation,
    StateKey,
    StopReason,
    TextDelta,
    ToolStep,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.session.activity import Activity, ActivityOwner
from cpuchat.session.options import ChatOptions
from cpuchat.telemetry.meter import ChatFigures, Meter, ReasoningTime

if TYPE_CHECKING:  # not needed before the first paint
    from cpuchat.chats.store import ChatStore
    from cpuchat.models.catalog import Recommended
    from cpuchat.models.drafts.choice import DraftChoice
    from cpuchat.tools.loop import ToolLoop


Calibrates = Literal["load", "later", "never"]

# Asked for "our conversation", Qwen2.5 Coder 1.5B answered 2 of 6 times that there was none to summarize.
_SUMMARIZE = (
    "Summarize the messages above, so that the conversation can continue from the summary alone. Keep facts, names, "
    "numbers, decisions, code and open questions; leave out greetings and repetitions. Write only the summary."
)
_LONGEST_SUMMARY = 1024  # tokens
_SHARE = 8  # of the context, which a summary has at most


class Conversation:
    """One open chat and the model that answers it. Use from one event loop.

    `draft_problem` is why the draft model that the settings name was not loaded. `on_save_problem` is called when that
    of the history changes. `logs_speed` False keeps no record of speeds. `asks_when_full`: a message that its chat has
    no room for fails (code context_full) unless the chat knows what to do. `output` is how answers are told. `store`:
    None keeps nothing. `library`: where draft models are looked for (None: the folders of the settings)."""

    def __init__(
        self, *, settings: Settings, backend: Backend, store: ChatStore | None, library: Library | None = None
    ) -> None:
        self.settings = settings
        self.tuned: Tuned | None = None
        """Tuned settings of the loaded model."""
        self.recommended: Recommended | None = None
        """The sampling that is recommended for it."""
        self.backend = backend
        self.meter = Meter()
        self.library = library
        self.drafts = True
        """Whether this run drafts, as the settings say."""
        self.draft_problem = ""
        self.parallel = 1
        """As of `LoadOptions`."""
        self.logs_speed = True
        self.asks_when_full = False
        self.kept_all = False
        """The last request was sent whole or not at all."""
        self.tools: ToolLoop | None = None
        """What answers may call; given up with the conversation."""
        self.output = Output()
        self.clock = time.monotonic
        self.on_save_problem: Callable[[], object] = lambda: None
        self.history = ChatHistory(store, lambda: self.on_save_problem())
        self.options = ChatOptions(self.history)
        self.activity = ActivityOwner()
        self._path: Source | None = None
        self._stopped_ms: dict[str, float] = {}  # in each phase of the running answer
        self._own_context: int | None = None  # of the chat that the model was loaded in, also if it has crashed
        self._usual_context = 0  # which the loaded model has in chats without one of their own, once it is known
        self._name = ""

    @property
    def model(self) -> ModelInfo | None:
        return self.backend.model

    @property
    def chat(self) -> Chat | None:
        """Return the open chat; None before its first message."""
        return self.history.chat

    @property
    def messages(self) -> list[StoredMessage]:
        """Return the messages of the open chat, including the answer being written."""
        return self.history.messages

    @property
    def speculation(self) -> Speculation:
        """Return how the next answer is drafted."""
        return self.in_effect.speculation.speculation() if self.drafts else Speculation()

    @property
    def chosen(self) -> Settings:
        """Return the settings with what tuning found for the loaded model and those of the chat."""
        return self.options.applied_to(
            self.tuned.applied_to(self.settings) if self.tuned is not None else self.settings
        )

    @property
    def in_effect(self) -> Settings:
        """Return what is `chosen`, and where nothing is, what is recommended for the loaded model."""
        return self.recommended.applied_to(self.chosen) if self.recommended is not None else self.chosen

    @property
    def default_sampling(self) -> Sampling:
        """Return the options of the loaded model where the settings have none."""
        return Sampling(**self.recommended.sampling) if self.recommended is not None else Sampling()

    @property
    def wants_other_context(self) -> bool:
        """Return whether the chat has another context of its own than the one that the model was loaded in, or will be
        after a crash."""
        return isinstance(self._path, Path) and self._own_context != self.options.own.get("engine.ctx")

    @property
    def n_ctx(self) -> int:
        """Return the context that the chat has, or will have once its next message loads the model again; 0: unknown"""
        loaded = self.model.n_ctx if self.model is not None else 0
        own = self.options.own.get("engine.ctx") or self._usual_context
        return own or loaded if self.wants_other_context else loaded

    @property
    def model_name(self) -> str:
        """Return the model's name, also after a crash, when the next message reloads it; else ""."""
        if self.model is not None:
            self._name = self.model.name
        return self._name

    def set_pace(self, frame_seconds: float) -> None:
        """Let so much time pass between two events with text."""
        self.output = msgspec.structs.replace(self.output, frame_seconds=frame_seconds)

    def figures(self) -> ChatFigures:
        """Return the current figures."""
        if not self.activity.is_streaming:
            self.meter.asked = self.speculation
            if self.model is None:
                self.meter.unloaded()
        figures = self.meter.figures(self.clock())
        if figures.n_ctx.value and self.wants_other_context:
            return replace(figures, n_ctx=replace(figures.n_ctx, value=self.n_ctx))
        return figures

    def was_stopped(self, seconds: float) -> None:
        """Leave out of the figures of an answer that its worker was stopped while it was written."""
        phase = self.meter.figures().phase
        self._stopped_ms[phase] = self._stopped_ms.get(phase, 0.0) + 1e3 * seconds

    def new_chat(self) -> None:
        """Start a new chat, which is stored with its first message. A running load continues."""
        self.activity.refuse_while_answering()
        self.history.clear()
        self.options.forget_choice()
        self.meter.chat_changed(0)

    async def open_chat(self, chat_id: str, message_id: int = 0) -> None:
        """Open a stored chat, on the branch of `message_id` unless 0. A running load continues. Raises ChatsError."""
        self.activity.refuse_while_answering()
        is_branch = self.chat is not None and self.chat.id == chat_id
        await self.history.open(chat_id, self.activity.refuse_while_answering, message_id)
        self.meter.chat_changed(self.history.n_past)
        last = self.messages[-1] if is_branch and self.messages else None
        if last is not None and last.timings is not None and last.model == self.model_name:
            reason = cast(StopReason, last.stop_reason or "cancelled")
            self.meter.observe(GenerationFinished(0, reason, last.timings), self.clock())
            self.meter.in_context(self.history.n_past)

    async def delete_chat(self, chat_id: str) -> None:
        """Delete a chat with everything saved for it; if it is open, a new chat replaces it. Raises ChatsError."""
        if self.chat is not None and self.chat.id == chat_id:
            self.activity.refuse_while_answering()
            self.history.saver.discard()
            self.new_chat()
        await self.history.delete(chat_id)
        await self.backend.forget(chat_id)

    async def delete_message(self, message_id: int) -> None:
        """Delete a message with all that follow, and open the branch beside. Raises as `ChatHistory.delete_branch`."""
        assert self.chat is not None
        self.activity.refuse_while_answering()
        chat_id = self.chat.id
        if await self.history.delete_branch(message_id):
            await self.open_chat(chat_id)
        else:
            self.new_chat()
        await self.backend.forget(chat_id)

    async def load_model(
        self, path: Source, *, strict: bool = False, calibrate: Calibrates = "load"
    ) -> AsyncGenerator[AnyEvent, None]:
        """Load with the options of the settings and, if there is one, a draft model; see `Backend.load`.

        A draft model that cannot be used is left out: why is in `draft_problem` if the settings name it, else in the
        notes of the model. `strict`: it was asked for with this very model; see `choose_draft`. `calibrate`: when what
        passes cost is measured; "never" takes no draft model that would need it. Raises UsageError: something is
        running; DraftMismatch, ModelNotFound, ModelDamaged: `strict`, and the draft model cannot be used."""
        with self.activity.streaming(Activity.LOADING):
            if path != self._path:
                self._path, self._usual_context = path, 0
            self.tuned = self.recommended = None
            on_server = isinstance(path, ServerModel)
            self.tuned = None if on_server else await asyncio.to_thread(find_tuned, path)
            draft, note = await self._choose_draft(path, strict, calibrate != "never")
            self.meter.asked = self.speculation
            self.meter.load_started()
            recommending = None if on_server else asyncio.create_task(asyncio.to_thread(_recommended, path))
            while not self.activity.is_stopping:
                failed: Failed | None = None
                chosen, self._own_context = self.in_effect, self.options.own.get("engine.ctx")
                options = chosen.load_options(str(draft or ""), calibrate=calibrate == "load")
                options = msgspec.structs.replace(options, parallel=self.parallel)
                stream = self.backend.load(path, options, PlacementSpec.of(chosen))
                async with contextlib.aclosing(stream) as events:
                    async for event in events:
                        if isinstance(event, Failed) and draft is not None and not strict:
                            failed = event  # it does not tell which of the two was at fault
                        else:
                            if isinstance(event, ModelLoaded) and recommending is not None and isinstance(path, Path):
                                event = await _remember_load(event, note, path, draft, self.any_library)
                                self.recommended = await recommending
                            self.meter.observe(event, self.clock())
                            if isinstance(event, ModelLoaded):  # a chat may have been opened before
                                self.meter.in_context(self.history.n_past)
                                if self._own_context is None:
                                    self._usual_context = event.model.n_ctx
                            yield event
                if failed is None:
                    return
                note = f"Loaded without the draft model {known_as(draft) if draft else ''}: {failed.message}"
                draft = None
            self.meter.observe(LoadCancelled(), self.clock())
            yield LoadCancelled()

    def reload(self) -> AsyncGenerator[AnyEvent, None]:
        """Reload the same model with the current settings. The open chat continues: its KV cache is saved before and
        restored with the next answer. Raises UsageError if no model was loaded before."""
        if self._path is None:
            raise UsageError("No model is loaded.", "Choose one first.")
        return self.load_model(self._path)

    async def calibrate(self) -> None:
        """Measure what passes of the loaded model cost, where that is not known yet."""
        with self.activity.streaming():
            found = await self.backend.measure(Measure(calibrates=True))
        if self.model is not None and isinstance(found, Measured):
            self.meter.calibrated(self.model)

    async def generate_detached(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        """Stream the answer to a request outside the chat: neither stored nor metered. Ends as `send` does."""
        with self.activity.streaming():
            async with contextlib.aclosing(self.backend.generate(request)) as events:
                if self.activity.is_stopping:
                    await self.backend.cancel()
                async for event in events:
                    yield event

    def send(
        self, text: str, *, attach: Attach | None = None, stop: tuple[str, ...] = (), grammar: str = "",
        json_schema: str = "",
    ) -> AsyncGenerator[AnyEvent, None]:  # fmt: skip
        """Add a user message with what `attach` reads, on a thread, and stream the answer; the rest as in `Generate`.
        Raises CpuchatError as `attach`, ChatsError: not saved (of both, nothing was sent); ChatsChanged: the chat had
        to be loaded again, also during the answer."""

        async def add() -> list[StoredMessage]:
            return await self.history.add_question(text, self.model_name, attach, **self.options.of_chat(self.settings))

        return self._answer(add, {"stop": stop, "grammar": grammar, "json_schema": json_schema})

    def regenerate(self, message_id: int = 0) -> AsyncGenerator[AnyEvent, None]:
        """Answer a question again (0: the last one); the answer's first token opens a branch. Raises as `send`."""
        return self._answer(lambda: self.history.up_to_question(message_id=message_id))

    def continue_answer(self) -> AsyncGenerator[AnyEvent, None]:
        """Let the model go on with the last answer, which was stopped or cut off. Raises as `send`."""
        return self._answer(self.history.up_to_answer, {"continues": True})

    def edit(self, text: str, message_id: int = 0, attach: Attach | None = None) -> AsyncGenerator[AnyEvent, None]:
        """Ask `text` with what `attach` returns in place of a question, the last one if `message_id` is 0; the first
        token of the answer opens a branch. Raises CpuchatError, ChatsError, ChatsChanged: as `send`."""
        return self._answer(lambda: self.history.up_to_question(text, message_id, attach))

    async def compact(self) -> AsyncGenerator[AnyEvent, None]:
        """Stream a summary of the open chat, but for an unanswered question at its end, and add it unless it was
        stopped; see `request_messages`. What does not fit beside the task is left out and told (`ContextTrimmed`). Ends
        with `GenerationFinished` or `Failed`. Raises UsageError: there is nothing to summarize, or an answer is
        running; ChatsError, ChatsChanged: it was not saved."""
        chat, model, covered = self.chat, self.model, self.messages
        if covered and covered[-1].role == "user":
            covered = covered[:-1]
        if covered and covered[-1].is_summary:
            raise UsageError("The chat is summarized already.", "Raise the context, or delete the summary (D on it).")
        if chat is None or not covered:
            raise UsageError("There is nothing to summarize.", "Send a message first.")
        longest = _LONGEST_SUMMARY
        if model is not None and model.n_ctx:
            longest = min(longest, max(model.n_ctx // _SHARE, 64))
        said, task = request_messages(chat.system_prompt, covered), Message(role="user", content=_SUMMARIZE)
        request = Generate(  # which continues the chat, so that its KV cache serves it
            messages=(*said, task),
            reasoning=False,
            reasoning_budget=0,
            speculation=self.speculation,
            tools=self.tools.toolbox.tools if self.tools is not None else (),  # they are in the KV cache
            max_tokens=longest,
            when_full="drop_least",
            **self.in_effect.sampling.request_options(),
        )
        written = ""
        async with contextlib.aclosing(self.generate_detached(request)) as events:
            async for event in events:
                if isinstance(event, TextDelta) and event.channel == "answer":
                    written += event.text
                elif isinstance(event, GenerationFinished) and event.calls and event.stop_reason != "cancelled":
                    event = Failed(
                        code="generation_failed",
                        message="The model called a tool in place of writing a summary.",
                        hint="Turn the tools off, and summarize again.",
                    )
                elif isinstance(event, GenerationFinished) and event.stop_reason != "cancelled":
                    is_open = self.chat is not None and self.chat.id == chat.id
                    if is_open and (text := written.strip()):
                        name = self.model_name or "Model"
                        await self.history.add_summary(text, name, event.stop_reason, event.timings)
                        self.meter.chat_changed(self.history.n_past)
                yield event

    async def end_reasoning(self) -> bool:
        """Let the model end its reasoning and answer now; False when it cannot."""
        return self.activity.now.answers and await self.backend.end_reasoning()

    async def stop(self) -> None:
        """Stop the load or answer that runs or is about to; its stream still ends with its final event."""
        if self.activity.is_streaming or self.activity.now.runs:
            self.activity.is_stopping = True
            if self.tools is not None:
                self.tools.stop()
            await self.backend.cancel()

    async def close(self) -> None:
        """Shut the worker down and save everything. What could not be saved is in `history.saver.answer`."""
        await self.history.saver.close()
        await asyncio.gather(self.backend.close(), *([self.tools.toolbox.close()] if self.tools is not None else []))
        await self.history.close_store()

    async def _answer(
        self, prepare: Callable[[], Awaitable[list[StoredMessage]]], more: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[AnyEvent, None]:
        history, reasoning, backend = self.history, ReasoningTime(), self.backend
        with self.activity.streaming(Activity.ANSWERING):
            messages = await prepare()
            request = self._request(messages, more or {})
            settings = AnswerSettings.of(request, self.model, self.default_sampling)
            history.begin_answer(messages, self.model_name, settings)
            is_rest = request.continues and messages[-1].timings is None  # its figures are not those of the answer
            self._start_meter()
            self._stopped_ms = {}
            if self.tools is None or request.continues or self.activity.is_stopping:
                stream = backend.generate(request)
            else:
                guided = not (self.model and self.model.server)
                stream = self.tools.answer(backend.generate, request, backend.count_tokens, guided=guided)
            try:
                async with contextlib.aclosing(stream) as events:
                    if self.activity.is_stopping:  # while the message was stored
                        await backend.cancel()
                    async for event in events:
                        event = reasoning.of(event)
                        if isinstance(event, GenerationFinished) and (stopped := self._stopped_ms):
                            timings = event.timings.less(stopped.get("prefill", 0.0), stopped.get("decoding", 0.0))
                            event, self._stopped_ms = msgspec.structs.replace(event, timings=timings), {}
                        self.meter.observe(event, self.clock())
                        finished = is_rest and isinstance(event, GenerationFinished)
                        stored = msgspec.structs.replace(event, timings=Timings()) if finished else event
                        if not await _put_event(history, stored, self.model_name):
                            break
                        if isinstance(event, GenerationFinished):
                            await self.remember_speed(event.timings)
                            event = msgspec.structs.replace(event, timings=history.answer.timings or event.timings)
                        yield event
                        if isinstance(event, CallDone) and not self.activity.is_stopping:
                            self._start_meter()
            finally:
                await history.end_answer()
            await history.require_own_answer()

    async def remember_speed(self, timings: Timings) -> None:
        """Keep what a whole answer tells of the model and of this machine, and raise the peak that it beat."""
        if self.logs_speed and (model := self.model) is not None:
            is_raised = await asyncio.to_thread(usage.answered, model, timings, self._memory_policy)
            peak = self.meter.figures().roofline.peak.value
            if is_raised or peak is None or peak.estimated:  # another program may have measured it
                await self.refresh_reach()

    async def refresh_reach(self) -> bool:
        """Give the meter what the cores of the loaded model reach, as measured; returns whether one computes here."""
        if (model := self.model) is None or model.server:
            return False
        reach = await asyncio.to_thread(reach_of, model, self._memory_policy)
        if self.model is not model:
            return False
        self.meter.reach = reach
        return True

    @property
    def _memory_policy(self) -> str:
        return self.backend.engine.memory_policy if self.backend.engine is not None else ""

    def _request(self, messages: Sequence[StoredMessage], more: Mapping[str, Any]) -> Generate:
        assert self.chat is not None
        can_summarize = bool(self.messages) and messages[-1].id == self.messages[-1].id  # the summary is to follow
        choice = self.chat.when_full or ("compact" if self.asks_when_full else "drop")
        keeps_all = len(messages) > 1 and (choice == "stop" or (choice == "compact" and can_summarize))
        self.kept_all = keeps_all and not more.get("continues")  # else summarizing makes room, and answers again
        return Generate(
            messages=request_messages(self.chat.system_prompt, messages), **self.in_effect.sampling.request_options(),
            **self.in_effect.chat.request_options(), when_full="refuse_early" if keeps_all else "drop",
            state=StateKey(chat=self.chat.id), speculation=self.speculation, output=self.output, **more,
        )  # fmt: skip

    async def _choose_draft(self, target: Source, strict: bool, calibrate: bool) -> tuple[Path | None, str]:
        """Return the draft model and a note about it; sets `draft_problem`. A server chooses its own."""
        self.draft_problem = ""
        if isinstance(target, ServerModel):
            return None, ""
        settings, library = self.in_effect, self.any_library

        def find() -> DraftChoice:
            from cpuchat.models.drafts.choice import draft_of_settings

            return draft_of_settings(target, settings, library, strict=strict, calibrate=calibrate)

        found = await asyncio.to_thread(find)
        self.draft_problem = found.problem
        return found.path, found.note

    @property
    def any_library(self) -> Library:
        """Return the `library`, else that of the folders of the settings."""
        return self.library or Library(self.settings.model.folders)

    def _start_meter(self) -> None:
        self.meter.asked = self.speculation
        self.meter.request_started(self.clock())


async def _put_event(history: ChatHistory, event: AnyEvent, model_name: str) -> bool:
    """Extend the answer by `event`; returns False when the chat no longer has it.

    The figures of an answer with calls of tools, or of one that was continued, are those of all its parts."""
    answer = history.answer
    match event:
        case TextDelta(channel="reasoning"):
            return await history.put_answer(reasoning=answer.reasoning + event.text)
        case TextDelta():
            return await history.put_answer(content=answer.content + event.text)
        case GenerationFinished():
            timings = answer.timings.followed_by(event.timings) if answer.timings is not None else event.timings
            goes_on = event.calls and event.stop_reason != "cancelled"  # after the calls
            stop_reason = None if goes_on else event.stop_reason
            return await history.put_answer(stop_reason=stop_reason, timings=timings, model=model_name)
        case CallsMade():
            step = ToolStep(said=event.said, reasoning=event.reasoning, calls=event.calls)
            return await history.put_answer(steps=(*answer.steps, step), content="", reasoning="")
        case CallDone() if answer.steps:
            *before, step = answer.steps
            step = msgspec.structs.replace(step, results=(*step.results, event.result))
            return await history.put_answer(steps=(*before, step))
        case Failed():
            asked, chat = history.question, history.chat
            if event.alone and not answer.steps and asked is not None and asked.id != UNSAVED and chat is not None:
                # Kept with the question, so that `request_messages` does not send it with the next one.
                with contextlib.suppress(CpuchatError):  # no store, or a full disk: known until the chat is closed
                    version = await asyncio.to_thread(history.store.update_message, asked.id, stop_reason=event.code)
                    if version == chat.version + 1:  # else changed by another instance too: the next change finds it
                        history.chat = msgspec.structs.replace(chat, version=version)
                marked = msgspec.structs.replace(asked, stop_reason=event.code)
                history.messages = [marked if one.id == asked.id else one for one in history.messages]
            return await history.put_answer(stop_reason=event.code)
    return await history.put_answer()


def stop_with_workers(conversations: Sequence[Conversation]) -> None:
    """Stop as on Ctrl+Z, the workers too, which are in process groups of their own. No figure counts that time."""
    seconds = stop_job([pid for one in conversations if (pid := one.backend.pid) is not None])
    for one in conversations:
        one.was_stopped(seconds)


def _recommended(model: Path) -> Recommended:
    from cpuchat.models.catalog import recommended

    return recommended(model)


async def _remember_load(
    event: ModelLoaded, note: str, path: Path, draft: Path | None, library: Library
) -> ModelLoaded:
    """Remember that the model was loaded; returns the event with one more note, unless the engine left the draft model
    out: its own note says why."""
    left_out = draft is not None and not event.model.draft
    models = [path] if draft is None or left_out else [path, draft]
    await asyncio.to_thread(usage.loaded, models)
    for model in models:
        await asyncio.to_thread(library.opened, model)
    if not note or left_out:
        return event
    return ModelLoaded(model=msgspec.structs.replace(event.model, notes=(*event.model.notes, note)))
