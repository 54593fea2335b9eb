"""One request, from its messages to the last event; and timing random tokens, with a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import msgspec
import numpy as np

from cpuchat.base.errors import ContextFull, Interrupted, UsageError
from cpuchat.base.text import common_prefix
from cpuchat.engine.decoding.decode import Decoder, DecodeResult, PrefillChunking, prefill
from cpuchat.engine.decoding.guided import AnswerGrammar, CallGuide, Grammar, ReasoningLimit, call_markers
from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.engine.drafting.speculator import Speculator
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.engine.llama.threads import CpuWait
from cpuchat.engine.llama.vocab import MARK
from cpuchat.engine.prompt.chat_template import PLAIN_STOPS, ChatTemplate, plain_completion
from cpuchat.engine.prompt.prompt_builder import PromptBuilder
from cpuchat.engine.states.prompt import RenderedPrompt
from cpuchat.engine.states.store import EvaluationStart, Live, StateStore
from cpuchat.engine.text.reasoning import ReasoningSplitter, Unsplit
from cpuchat.engine.text.text_stream import CallSplitter, OutputThread, TextStream, ThreadedStream
from cpuchat.protocol.messages import (
    ContextTrimmed,
    Event,
    Generate,
    GenerationFinished,
    Measure,
    Message,
    PrefillProgress,
    SpeculationUpdate,
    StopReason,
    TextDelta,
)
from cpuchat.protocol.timings import MAX_CPU_WAIT, Reuse, SpeculationFigures, Timings
from cpuchat.tools.call_format import GENERIC, CallFormat, as_text


@dataclass
class LoadedModel:
    """A model with all that answers need: the stores of its `lanes`, the `speculator` of answers on the engine's
    thread, and `beside` that of each lane for others, without the draft model. `template` None: the model has none."""

    model: Model
    template: ChatTemplate | None
    lanes: list[StateStore]
    speculator: Speculator
    beside: list[Speculator]
    chunking: PrefillChunking

    @property
    def states(self) -> StateStore:
        """Return the store of the first lane."""
        return self.lanes[0]


LOOK_SECONDS = 1.0
"""Seconds between two looks at whether other programs have the cores; each reads a file per thread."""


class AnswerRun:
    """Answers one request. `arrived`: `perf_counter()` when the request reached this process. `emit`: takes every
    event. `abort`: stops it; None: it runs on the engine's thread, where that of the engine does."""

    def __init__(
        self,
        loaded: LoadedModel,
        command: Generate,
        arrived: float,
        emit: Callable[[Event], None],
        output_thread: OutputThread,
        abort: AbortFlag | None = None,
    ) -> None:
        self._loaded = loaded
        self._is_beside = abort is not None
        self.abort = abort or loaded.model.sequence.abort
        self._output_thread = output_thread
        self._command = command
        self._arrived = arrived
        self._emit = emit
        self._vocab = vocab = loaded.model.vocab
        self._store, self._sequence = loaded.states, loaded.model.sequence  # of its lane, once it has one
        if command.grammar and (command.stop or command.ignore_eos):
            raise UsageError("An answer that must match a grammar ends by the grammar.", "Leave the stop strings out.")
        self._guide = grammar = None
        if command.tools and command.calling.mode != "none":
            self._guide = CallGuide(vocab, self._call_format, command.tools, command.calling)
            grammar = self._guide.from_start(command.grammar)
        elif command.grammar:
            grammar = Grammar(vocab, command.grammar)
        budget = 0 if command.reasoning is False else command.reasoning_budget
        self.reasoning = ReasoningLimit(vocab, budget, is_required=grammar is not None)
        self._grammar = AnswerGrammar(vocab, grammar, self._guide, self.reasoning)
        banned = vocab.eog_tokens if command.ignore_eos else ()
        if command.tools and self._guide is None:
            banned = (*banned, *call_markers(vocab, self._call_format))
        self._sampler = Sampler(command.sampling, vocab.n_tokens, banned, (self.reasoning, self._grammar))
        self._speculation: SpeculationFigures | None = None
        self._text: TextStream | None = None
        self._reuse: Reuse | None = None
        self._prompt_tokens: list[int] = []
        self._calls: CallSplitter | None = None
        self._waits: CpuWait  # since the first token
        self._cpu_wait: float | None = None  # as in `Timings`, when last looked
        self._cpu_ran: float | None = None
        self._told_wait: float | None = None  # the same, when last told
        self._continued = ""  # what the prompt has of the answer already, at its end
        self._next_look = 0.0

    @property
    def _call_format(self) -> CallFormat:
        template = self._loaded.template
        return template.call_format if template is not None else GENERIC

    def run(self) -> None:
        """Answer. Raises CpuchatError when the request cannot be answered."""
        if not self._is_beside:
            self._loaded.model.pool.begin_answer(perf_counter())
        try:
            prompt = self._build_prompt()
        except Aborted:
            self._finish("cancelled", Timings())
            return
        except ContextFull as error:
            largest = self._loaded.model.info.n_ctx_train
            if not largest or self._sequence.n_ctx < largest:
                error.hint = f"{error.hint.removesuffix('.')}, or raise the context size (Alt+S in the app, or --ctx)."
            raise
        self._store = self._loaded.states.take(prompt, self._command.state)
        self._sequence = self._store.sequence
        before, self._sequence.abort = self._sequence.abort, self.abort
        try:
            self._answer(prompt)
        finally:
            self._sequence.release()
            self._sequence.abort = before
            self._store.give_back()

    def _answer(self, prompt: RenderedPrompt) -> None:
        loaded, store = self._loaded, self._store
        try:
            start = store.begin(prompt, self._command.state)
        except Aborted:
            self._finish("cancelled", Timings())
            return
        self._reuse, self._prompt_tokens = start.reuse, prompt.tokens
        since = perf_counter()
        row = self._prefill(prompt, start, since)
        if row is None:
            return
        prompt_n, prompt_ms = len(prompt.tokens) - start.n, 1e3 * (perf_counter() - since)
        result = DecodeResult(stop_reason="cancelled")
        try:
            self._sampler.accept_prompt(prompt.tokens)
            self._waits, self._next_look = CpuWait(loaded.model.info.n_threads), perf_counter() + LOOK_SECONDS
            result = self._decode(prompt, row)
            self._look_at_cores()
        finally:
            self._sequence.release()
            store.record(prompt, result.tokens)
        n, speculation = len(result.tokens), self._speculation
        timings = Timings(
            cache_n=start.n,
            prompt_n=prompt_n,
            prompt_ms=prompt_ms if prompt_n else 0.0,
            predicted_n=n,
            predicted_ms=1e3 * (result.last - result.first) if n else 0.0,
            ttft_ms=1e3 * (result.first - self._arrived) if n else 0.0,
            draft_n=speculation.draft_n if speculation else 0,
            draft_n_accepted=speculation.draft_n_accepted if speculation else 0,
            speculation=self._compared(speculation) if speculation else None,
            overhead_us=1e6 * result.overhead_seconds / n if n else 0.0,
            cpu_wait=self._cpu_wait,
            cpu_ran=self._cpu_ran,
        )
        self._finish(result.stop_reason, timings, result.tokens)

    def count_prompt(self) -> int:
        """Return the tokens of the prompt. Raises CpuchatError."""
        return self._prompt_builder().count(self._command.messages)

    def _prompt_builder(self) -> PromptBuilder:
        histories = self._loaded.states.histories(self._command.state.owner)
        return PromptBuilder(self._vocab, self._render, histories, self._sequence.n_ctx, self.abort)

    def _build_prompt(self) -> RenderedPrompt:
        command, builder = self._command, self._prompt_builder()
        if command.fill is not None:
            return builder.from_fill(command.prompt or "", command.fill, command.max_tokens)
        if command.prompt is not None:
            return builder.from_text(command.prompt)
        if not command.messages:
            raise UsageError("There is no message to answer.", "Write one first.")
        if command.when_full not in ("drop", "drop_least"):
            room = command.max_tokens if command.when_full == "refuse_early" else None
            return builder.from_all_messages(command.messages, room)
        in_steps = command.when_full == "drop"
        prompt, trimmed = builder.from_messages(command.messages, command.max_tokens, in_steps=in_steps)
        if prompt.is_trimmed:
            self._emit(
                ContextTrimmed(
                    request_id=command.request_id,
                    dropped_messages=trimmed.dropped_messages,
                    dropped_tokens=trimmed.dropped_tokens,
                    n_ctx=self._sequence.n_ctx,
                )
            )
        return prompt

    def _render(self, messages: list[Message]) -> str:
        template, tools = self._loaded.template, [self._vocab.mark_tool(tool) for tool in self._command.tools]
        *before, last = messages
        asked = before if self._command.continues else messages
        if template is not None:
            text = template.render(asked, self._command.reasoning, tools, self._command.effort)
        else:
            text = plain_completion(as_text(asked, tools))
        if self._command.continues:
            written = self._new_splitter(text).written(last.reasoning, last.content)
            self._continued = written.encode("utf-8", "replace").decode()
        return text + self._continued

    def _prefill(self, prompt: RenderedPrompt, start: EvaluationStart, since: float) -> np.ndarray | None:
        """Evaluate the prompt; returns the logits after it, None when cancelled, after emitting the last event."""
        done = start.n

        def on_progress(processed: int) -> None:
            nonlocal done
            done = processed
            self._emit(
                PrefillProgress(
                    request_id=self._command.request_id,
                    processed=processed,
                    total=len(prompt.tokens),
                    cache_n=start.n,
                    reuse=start.reuse,
                )
            )

        try:
            return prefill(self._store, prompt, start, self._loaded.chunking, on_progress)
        except Aborted:
            evaluated = max(len(self._sequence), done) - start.n
            prompt_ms = 1e3 * (perf_counter() - since)
            self._finish("cancelled", Timings(cache_n=start.n, prompt_n=evaluated, prompt_ms=prompt_ms))
            return None

    def _decode(self, prompt: RenderedPrompt, row: np.ndarray) -> DecodeResult:
        command, loaded, is_eog = self._command, self._loaded, self._vocab.is_eog
        speculator = loaded.beside[self._sequence.id] if self._is_beside else loaded.speculator
        stops, ends_itself = command.stop, command.ignore_eos or command.grammar
        if self._loaded.template is None and command.prompt is None and not ends_itself:
            stops = (*stops, *PLAIN_STOPS)  # without a template only the next speaker's name shows the end
        splitter, piece = Unsplit() if command.output.unsplit else self._splitter(prompt.text), self._vocab.piece
        if self._guide is not None:
            piece = self._guide.piece
            splitter = self._calls = CallSplitter(
                splitter, self._call_format, command.tools, command.calling, streams=command.output.streams_calls
            )
        self._text = TextStream(
            command.request_id, self._tell_text, piece, splitter, stops, self._arrived, command.output.frame_seconds,
            command.fill,
        )  # fmt: skip
        # On this thread where the text tells its end: with the token that completes a stop string, or a line.
        stream = self._text if stops or command.fill is not None else ThreadedStream(self._output_thread, self._text)
        self.reasoning.begin(self._splitter(prompt.text))
        is_drafting = speculator.begin_answer(command.speculation, prompt.tokens)
        if not is_drafting and speculator.disabled is not None:
            self._speculation = speculator.figures()
            self._on_speculation(0, self._speculation)
        drafting, told = speculator if is_drafting else None, self._on_speculation
        decoder = Decoder(self._sequence, self._sampler, stream, is_eog, command.max_tokens, drafting, told)
        result = decoder.run(row)
        if is_drafting:
            self._speculation = speculator.figures()
        return result

    def _splitter(self, text: bytes) -> ReasoningSplitter:
        splitter = self._new_splitter(text.decode("utf-8", "replace").removesuffix(self._continued))
        splitter.resume(self._continued.replace(MARK, ""))
        return splitter

    def _new_splitter(self, prompt: str) -> ReasoningSplitter:
        tail = prompt[-200:].replace(MARK, "")  # where an opening reasoning marker would be
        return ReasoningSplitter(tail, self._loaded.model.header.chat_template)

    def _look_in_time(self) -> None:
        if (now := perf_counter()) >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look_at_cores()

    def _look_at_cores(self) -> None:
        self._cpu_wait, self._cpu_ran = self._waits.shares()
        if self._cpu_ran is not None and self._loaded.model.pool.left_any:  # threads that gave way do not wait
            self._cpu_wait = max(self._cpu_wait or 0.0, 1 - self._cpu_ran)

    def _tell_text(self, event: Event) -> None:
        self._look_in_time()
        if isinstance(event, TextDelta) and self._cpu_wait != self._told_wait:
            self._told_wait = self._cpu_wait
            event = msgspec.structs.replace(event, cpu_wait=self._cpu_wait, cpu_ran=self._cpu_ran)
        self._emit(event)

    def _compared(self, figures: SpeculationFigures) -> SpeculationFigures:
        """Return the figures without a comparison with plain decoding if other programs were using the cores."""
        if (self._cpu_wait or 0.0) <= MAX_CPU_WAIT or figures.plain_ms is None:
            return figures
        return msgspec.structs.replace(figures, plain_ms=None, disturbed=True)

    def _finish(self, stop_reason: StopReason, timings: Timings, tokens: Iterable[int] = ()) -> None:
        sequence, tells = self._sequence, self._command.output.tokens
        reuse = self._reuse
        if reuse is not None and (note := self._store.take_note()):
            reuse = msgspec.structs.replace(reuse, note=note)
        timings = msgspec.structs.replace(
            timings, n_past=len(sequence), n_ctx=sequence.n_ctx, seed=self._sampler.seed, reuse=reuse
        )
        self._emit(
            GenerationFinished(
                request_id=self._command.request_id,
                stop_reason=stop_reason,
                timings=timings,
                note=self._loaded.model.pool.note,
                matches_grammar=self._grammar.is_met,
                calls=self._calls.calls if self._calls is not None else (),
                prompt_tokens=tuple(self._prompt_tokens) if tells else (),
                tokens=tuple(tokens) if tells else (),
                stop_string=self._text.stop_string if self._text is not None and stop_reason == "stop_string" else "",
            )
        )

    def _on_speculation(self, predicted_n: int, figures: SpeculationFigures) -> None:
        self._look_in_time()
        figures = self._compared(figures)
        self._emit(SpeculationUpdate(request_id=self._command.request_id, predicted_n=predicted_n, figures=figures))


def measure(loaded: LoadedModel, command: Measure) -> tuple[float, float | None]:
    """Return the seconds of one run, and the share of them for which the threads waited for a core (None: not known).

    The `depth` tokens are the same each time: runs that follow each other evaluate them once. Raises Interrupted:
    cancelled; UsageError: the tokens do not fit the context; GenerationFailed: llama.cpp rejected a batch."""
    model, sequence = loaded.model, loaded.model.sequence
    needed = command.depth + command.n_prompt + command.n_gen
    if needed > sequence.n_ctx:
        raise UsageError(
            f"{needed:,} tokens do not fit the context of {sequence.n_ctx:,}.", "Load the model with a larger context."
        )
    loaded.states.leave()
    loaded.states.live = Live()
    try:
        parts: list[list[int]] = []
        for seed, count in enumerate((command.depth, command.n_prompt, command.n_gen)):
            tokens = np.random.default_rng(seed).integers(model.vocab.n_tokens, size=count).tolist()
            # As in llama-bench.
            parts.append([model.vocab.bos, *tokens[1:]] if tokens and model.vocab.bos >= 0 else tokens)
        before, prompt, answer = parts
        sequence.truncate(common_prefix(sequence.tokens, before))
        for at in range(len(sequence), len(before), sequence.n_batch):
            sequence.extend(before[at : at + sequence.n_batch])
        waits, start = CpuWait(model.info.n_threads), perf_counter()
        for at in range(0, len(prompt), sequence.n_batch):
            sequence.extend(prompt[at : at + sequence.n_batch], n_outputs=1)
        for token in answer:
            sequence.step(token)
        return perf_counter() - start, waits.share()
    except Aborted:
        raise Interrupted("The measurement was cancelled.") from None
