"""The engine as the worker drives it: commands in, events out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import msgspec

from cpuchat.base.errors import CpuchatError, Interrupted, UsageError
from cpuchat.engine.answer import AnswerRun, LoadedModel, measure
from cpuchat.engine.decoding.decode import PrefillChunking
from cpuchat.engine.drafting.speculator import SpeculationSetup, set_up_speculation
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model, available_for_model
from cpuchat.engine.llama.passes import Passes
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.engine.llama.threads import leave_cores
from cpuchat.engine.prompt.chat_template import ChatTemplate, TemplateHelper
from cpuchat.engine.scoring import Scorer
from cpuchat.engine.states.files import DiskWriter, StateFiles, WriteBudget
from cpuchat.engine.states.store import StateStore
from cpuchat.engine.text.reasoning import MARKER_TOKENS
from cpuchat.engine.text.text_stream import OutputThread
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.protocol.messages import (
    CountTokens,
    Event,
    Failed,
    Generate,
    LoadCancelled,
    LoadModel,
    LoadProgress,
    Measure,
    Measured,
    ModelLoaded,
    Score,
    TokensCounted,
    TokensScored,
)
from cpuchat.protocol.model_info import ModelInfo


class Engine:
    """Loads one model at a time and answers with it, until it is closed.

    All methods but those around `cancel` and `…_beside` belong to one thread, which also computes. Expected failures
    become `Failed` events; the model then stays loaded, unless the load failed. `emit` takes every event, on the
    threads of answers and on the output thread. `budget`: how much of saved chats may be written to disk.

    An answer that is alone runs on the engine's thread. Up to `parallel` run at once, the others on threads of their
    own (`engine.llama.passes`); the engine's evaluates their tokens, with its own answer or in `run_beside`."""

    def __init__(self, emit: Callable[[Event], None], budget: WriteBudget | None = None) -> None:
        bindings.start()
        self._emit = emit
        self._abort = AbortFlag()
        self._budget = budget or WriteBudget()
        # Made while this thread is not pinned, because they inherit its CPUs.
        self._output_thread = OutputThread()
        self._writer = DiskWriter()
        self._model: Model | None = None
        self._loaded: LoadedModel | None = None
        self._answers: dict[int, AnswerRun] = {}
        self._beside: dict[int, AbortFlag] = {}
        self._setup: SpeculationSetup | None = None
        self._scorer: Scorer | None = None
        self._template: TemplateHelper | None = None

    def cancel(self, request_id: int = 0) -> None:
        """Cancel that answer if it runs beside the engine's thread, else what is under way there, or the next one. From
        any thread; the latter holds until `clear_cancel`."""
        self._beside.get(request_id, self._abort).set()
        self._wake()

    def cancel_for_good(self) -> None:
        """Cancel everything from now on. From any thread; `close` still saves."""
        for flag in (self._abort, *list(self._beside.values())):
            flag.set_permanently()
        self._wake()

    def _wake(self) -> None:
        model = self._model
        if model is not None and model.passes is not None:
            model.passes.wake()

    def clear_cancel(self) -> None:
        """End the effect of `cancel`. From any thread."""
        self._abort.clear()

    def load(self, command: LoadModel) -> None:
        """Load a model in place of the one in use. Ends with `ModelLoaded`, `LoadCancelled` or `Failed`."""
        self._free(self._abort.is_set)
        try:
            info = self._load(command)
        except BaseException as error:
            self._free_model()
            if not isinstance(error, CpuchatError):
                raise
            self._emit(LoadCancelled() if isinstance(error, Interrupted) else Failed.of(error, command.request_id))
            return
        self._rest()
        self._emit(ModelLoaded(model=info))
        if command.resumes and self._loaded is not None:
            with contextlib.suppress(Aborted):
                self._loaded.states.resume()

    def _load(self, command: LoadModel) -> ModelInfo:
        available = available_for_model()
        model = self._model = Model.load(
            Path(command.path),
            command.options,
            command.cpus,
            on_progress=self._on_progress,
            abort=self._abort,
            visible_markers=tuple(sorted(MARKER_TOKENS)),
            on_header=self._start_template,
            roams=command.roams,
            available=available,
        )
        left = available - model.plan.need.min_bytes
        setup = self._setup = set_up_speculation(model, command, left, self._on_progress, self._abort)
        if setup.draft is not None:
            left -= setup.draft.need.min_bytes
        template = self._template and ChatTemplate(self._template, model.vocab.bos_text, model.vocab.eos_text)
        files, draft = None, setup.draft
        if command.state_dir:
            files = StateFiles(Path(command.state_dir), command.state_limit, model.state_key(), self._writer)
        limit = min(command.state_limit, max(left, 0) // 2)
        of_draft = (None, "") if draft is None else (draft.sequence, draft.state_key())
        states = StateStore(model.sequence, model.vocab.raw_piece, limit, files, self._budget, *of_draft, model.passes)
        lanes = [states, *(states.beside(lane) for lane in model.lanes if lane is not model.sequence)]
        partial = model.sequence.partial_bytes
        model.info = msgspec.structs.replace(
            model.info,
            state_memory=states.limit,
            partial_state=partial,
            takes_effort=template is not None and template.takes_effort,
        )
        beside = [setup.speculator.beside() for _ in lanes] if model.passes is not None else []
        self._loaded = LoadedModel(model, template, lanes, setup.speculator, beside, PrefillChunking.of(model))
        return model.info

    def _start_template(self, header: GGUFHeader) -> None:
        if header.chat_template:
            self._template = TemplateHelper(header.chat_template)
            self._template.warm_up()

    def _on_progress(self, phase: str, done: int, total: int) -> None:
        self._emit(LoadProgress(phase=phase, done=done, total=total))

    def end_reasoning(self, request_id: int) -> None:
        """Let that answer end its reasoning if it is under way. From any thread."""
        answer = self._answers.get(request_id)
        if answer is not None:
            answer.reasoning.end()

    def generate(self, command: Generate, arrived: float | None = None) -> None:
        """Answer a request, which `arrived` then (None: now). Ends with `GenerationFinished` or `Failed`."""
        arrived = perf_counter() if arrived is None else arrived
        with self._answering(command.request_id):
            self._run_answer(command, arrived)

    def _run_answer(self, command: Generate, arrived: float) -> None:
        request_id = command.request_id
        flag = self._beside.get(request_id)
        answer = AnswerRun(self._ready(), command, arrived, self._emit, self._output_thread, flag)
        self._answers[request_id] = answer
        try:
            answer.run()
        finally:
            self._answers.pop(request_id, None)

    @property
    def parallel(self) -> int:
        """Return how many answers may run at once."""
        return len(self._loaded.lanes) if self._loaded is not None else 1

    def begin_beside(self, key: int) -> None:
        """Expect `generate_beside` on a thread of its own until `end_beside`; `key` is the request's ID. From any
        thread, while the engine's answers, or is in `run_beside`."""
        self._beside[key] = AbortFlag()
        self._passes.begin_beside()

    def end_beside(self, key: int) -> None:
        del self._beside[key]
        self._passes.end_beside()

    @property
    def _passes(self) -> Passes:
        passes = self._ready().model.passes
        assert passes is not None
        return passes

    def generate_beside(self, command: Generate | CountTokens, arrived: float) -> None:
        """Answer as `generate`, or `count_tokens`, after `begin_beside`. On a thread of its own."""
        leave_cores()
        try:
            if isinstance(command, CountTokens):
                self.count_tokens(command)
            else:
                self._run_answer(command, arrived)
        except CpuchatError as error:
            self._emit(Failed.of(error, command.request_id))

    @property
    def n_beside(self) -> int:
        """Return how many answers run, or are about to, on threads of their own."""
        return len(self._beside)

    def run_beside(self) -> None:
        """Compute for the answers on other threads, until there are none."""
        if self._beside:
            self._writer.pause()
            self._passes.run_beside()
        self._rest()  # the last one may have ended since this thread's own answer did

    def measure(self, command: Measure) -> None:
        with self._answering(command.request_id):
            if command.calibrates:
                start = perf_counter()
                pass_ms = self._calibrate(self._ready())
                self._emit(Measured(command.request_id, perf_counter() - start, pass_ms=pass_ms))
                return
            seconds, cpu_wait = measure(self._ready(), command)
            self._emit(Measured(request_id=command.request_id, seconds=seconds, cpu_wait=cpu_wait))

    def _calibrate(self, loaded: LoadedModel) -> tuple[float, ...]:
        """Measure what passes cost, unless that is known or the chat would be lost; returns as `ModelInfo.pass_ms`."""
        model, setup = loaded.model, self._setup
        assert setup is not None
        if setup.is_due(model) and loaded.states.set_aside():
            try:
                setup.calibrate(model)
            except Aborted:
                raise Interrupted("The measurement was cancelled.") from None
            for one in loaded.beside:
                one.follow(setup.speculator)
        return model.info.pass_ms

    def score(self, command: Score) -> None:
        """Run one command of a scoring job. Ends with `TokensScored` or `Failed`."""
        with self._answering(command.request_id):
            try:
                if not command.tokens:
                    self._end_scoring()
                    self._emit(TokensScored(request_id=command.request_id))
                    return
                if self._scorer is None or not self._scorer.fits(command):
                    self._end_scoring()
                    self._scorer = Scorer(self._ready(), command)
                self._emit(self._scorer.score(command))
            except Aborted:
                self._end_scoring()
                raise Interrupted("Stopped.") from None
            except OSError as error:
                raise UsageError(f"The models cannot exchange their predictions: {error.strerror}.", "") from None

    def _end_scoring(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
        self._scorer = None

    @contextlib.contextmanager
    def _answering(self, request_id: int) -> Iterator[None]:
        """Compute for one request; what fails becomes `Failed`."""
        self._writer.pause()
        try:
            yield
        except CpuchatError as error:
            self._emit(Failed.of(error, request_id))
        finally:
            if not self._beside:
                self._rest()

    def _ready(self) -> LoadedModel:
        if self._loaded is None:
            raise UsageError("No model is loaded.", "Load a model first.")
        return self._loaded

    def _rest(self) -> None:
        """Leave the cores to others, until the next request."""
        if self._model is not None:
            self._model.pool.rest()
        self._writer.resume()

    def forget(self, chat_id: str) -> None:
        """Drop a deleted chat from memory and disk, and draft from it no more; end a scoring job."""
        self._end_scoring()
        loaded = self._loaded
        if loaded is not None and any([lane.forget(chat_id) for lane in loaded.lanes]):
            for speculator in (loaded.speculator, *loaded.beside):
                speculator.forget()

    def count_tokens(self, command: CountTokens) -> None:
        """Count the tokens of a text or a prompt. Ends with `TokensCounted`."""
        n_tokens, prompt = None, command.prompt
        if self._loaded is not None:
            with contextlib.suppress(CpuchatError, Aborted):  # the template takes no such messages
                if prompt is not None:
                    flag = self._beside.get(-command.request_id)
                    n_tokens = AnswerRun(
                        self._loaded, prompt, perf_counter(), self._emit, self._output_thread, flag
                    ).count_prompt()
                else:
                    n_tokens = len(self._loaded.model.vocab.tokenize(command.text.encode(), add_special=False))
        self._emit(TokensCounted(request_id=command.request_id, n_tokens=n_tokens))

    def idle(self) -> None:
        """Begin to save what a crash would lose; called when the engine has been idle for a while."""
        if self._setup is not None:
            self._setup.save()
        if self._loaded is not None and not self._writer.is_busy:
            for lane in sorted(self._loaded.lanes, key=lambda one: one.used):
                lane.save(waits=True)

    def close(self) -> None:
        self._free()
        self._output_thread.close()
        self._writer.close()

    def _free(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Save the chat, unless `is_cancelled` meanwhile, and free the model."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            for lane in sorted(loaded.lanes, key=lambda one: one.used):
                lane.close(is_cancelled)
        self._free_model()

    def _free_model(self) -> None:
        self._end_scoring()
        if self._setup is not None:
            self._setup.free()
        if self._model is not None:
            self._model.free()
        if self._template is not None:
            self._template.close()
        self._setup = self._model = self._template = None
