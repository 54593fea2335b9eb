"""One request, from its messages to the last event."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import msgspec

from cpuchat.engine.decoding.call_guide import CallGuide
from cpuchat.engine.decoding.decode import DecodeResult, Prefill, decode, prefill
from cpuchat.engine.decoding.guided import GuidedSampler
from cpuchat.engine.decoding.speculative import SpeculativeDecoder
from cpuchat.engine.llama.control_text import MARK
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.engine.llama.threads import cpu_wait_seconds, cpu_wait_share
from cpuchat.engine.loaded import LoadedModel
from cpuchat.engine.prompt.chat_template import PLAIN_STOPS, plain_completion
from cpuchat.engine.prompt.prompt_builder import PromptBuilder
from cpuchat.engine.prompt.trim import TrimResult
from cpuchat.engine.text.call_splitter import CallSplitter
from cpuchat.engine.text.output_thread import OutputThread, ThreadedStream
from cpuchat.engine.text.reasoning import ReasoningSplitter, Unsplit
from cpuchat.engine.text.text_stream import TextStream
from cpuchat.errors import ContextFull, UsageError
from cpuchat.protocol import (
    ContextTrimmed,
    Event,
    Generate,
    GenerationFinished,
    Message,
    PrefillProgress,
    SpeculationUpdate,
    StopReason,
)
from cpuchat.timings import MAX_CPU_WAIT, SpeculationFigures, Timings
from cpuchat.tools.call_format import CallFormat
from cpuchat.tools.generic import GENERIC, as_text

_PROMPT_TAIL = 200
"""Characters at the end of a prompt that are searched for an opening reasoning marker."""
_LOOK_SECONDS = 1.0
"""Seconds between two looks at whether other programs have the cores; each reads a file per thread."""


class Answer:
    """Answers one request.

    Args:
        arrived: `perf_counter()` when the request reached this process.
        emit: takes every event.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        command: Generate,
        arrived: float,
        emit: Callable[[Event], None],
        output_thread: OutputThread,
    ) -> None:
        self._loaded = loaded
        self._output_thread = output_thread
        self._command = command
        self._arrived = arrived
        self._emit = emit
        self._vocab = loaded.model.vocab
        self._sequence = loaded.model.sequence
        self._guide = CallGuide(self._vocab, self._call_format, command.tools) if command.tools else None
        self._sampler = self._make_sampler()
        self._speculation: SpeculationFigures | None = None
        self._calls: CallSplitter | None = None
        self._is_disturbed = False  # other programs had the cores for part of the decoding
        self._waited: float | None = None
        self._continued = ""  # what the prompt has of the answer already, at its end
        self._decoding_since = self._next_look = 0.0

    @property
    def _call_format(self) -> CallFormat:
        template = self._loaded.template
        return template.call_format if template is not None else GENERIC

    def _make_sampler(self) -> GuidedSampler:
        command, vocab = self._command, self._vocab
        if command.grammar and (command.stop or command.ignore_eos):
            raise UsageError("An answer that must match a grammar ends by the grammar.", "Leave the stop strings out.")
        budget = 0 if command.reasoning is False else command.reasoning_budget
        banned = vocab.eog_tokens if command.ignore_eos else ()
        return GuidedSampler(command.sampling, vocab, command.grammar, budget, self._guide, banned)

    def end_reasoning(self) -> None:
        """End the reasoning under way, or the next one. From any thread."""
        self._sampler.end_reasoning()

    def run(self) -> None:
        """Answer. Raises CpuchatError when the request cannot be answered."""
        command, loaded = self._command, self._loaded
        if command.owner != loaded.owner:
            loaded.change_owner(command.owner)
        saved = None
        if command.chat_id != loaded.chat_id:
            saved = loaded.switch_chat(command.chat_id, across_chats=command.speculation.across_chats)
        histories = (loaded.history,) if saved is None else (loaded.history, saved.history)
        if loaded.pool is not None:
            histories = (*histories, *loaded.pool.histories)
        builder = PromptBuilder(self._vocab, self._render, histories, self._sequence.n_ctx, self._check)
        try:
            text, prompt = self._build_prompt(builder)
        except Aborted:
            self._finish("cancelled", Timings())
            return
        except ContextFull as error:
            largest = loaded.model.info.n_ctx_train
            if not largest or self._sequence.n_ctx < largest:
                error.hint = f"{error.hint.removesuffix('.')}, or raise the context size (--ctx)."
            raise
        if saved is not None:
            loaded.restore(command.chat_id, saved, text, prompt)
        if loaded.pool is not None:
            loaded.history = loaded.pool.exchange(self._sequence, loaded.history, text, prompt)
        # Beside the prefill, and where most of the prompt is cached, beside the first tokens.
        self._output_thread.run(loaded.speculator.index_prompt(command.speculation, prompt))
        prefilled = self._prefill(text, prompt)
        if prefilled is None:
            return
        result = DecodeResult(stop_reason="cancelled")
        try:
            self._sampler.accept_prompt(prompt)
            self._waited, self._decoding_since = cpu_wait_seconds(), perf_counter()
            self._next_look = self._decoding_since + _LOOK_SECONDS
            result = self._decode(text, prompt, prefilled)
            cpu_wait = self._look_at_cores()
        finally:
            self._record(text, prompt, result.tokens)
        self._finish(result.stop_reason, self._timings(prefilled, result, cpu_wait))

    def _check(self) -> None:
        """Raise Aborted once the request is cancelled."""
        if self._sequence.abort.is_set():
            raise Aborted

    def _build_prompt(self, builder: PromptBuilder) -> tuple[bytes, list[int]]:
        command = self._command
        if command.prompt is not None:
            return builder.from_text(command.prompt)
        if not command.messages:
            raise UsageError("There is no message to answer.", "Write one first.")
        if not command.trim:
            return builder.from_all_messages(command.messages, command.max_tokens if command.reserve else None)
        return builder.from_messages(
            command.messages, command.max_tokens, self._on_trimmed, in_steps=not command.reserve
        )

    def _render(self, messages: list[Message]) -> str:
        template, tools = self._loaded.template, [self._vocab.mark_tool(tool) for tool in self._command.tools]
        *before, last = messages
        asked = before if self._command.continues else messages
        if template is not None:
            text = template.render(asked, self._command.reasoning, tools)
        else:
            text = plain_completion(as_text(asked, tools))
        if self._command.continues:
            written = self._new_splitter(text).written(last.reasoning, last.content)
            self._continued = written.encode("utf-8", "replace").decode()
        return text + self._continued

    def _on_trimmed(self, trimmed: TrimResult) -> None:
        self._emit(
            ContextTrimmed(
                request_id=self._command.request_id,
                dropped_messages=trimmed.dropped_messages,
                dropped_tokens=trimmed.dropped_tokens,
                n_ctx=self._sequence.n_ctx,
            )
        )

    def _prefill(self, text: bytes, prompt: list[int]) -> Prefill | None:
        """Evaluate the prompt; returns None when cancelled, after emitting the last event."""
        request_id, start = self._command.request_id, perf_counter()
        processed = cached = 0

        def on_progress(done: int, cache_n: int) -> None:
            nonlocal processed, cached
            processed, cached = done, cache_n
            self._emit(PrefillProgress(request_id=request_id, processed=done, total=len(prompt), cache_n=cache_n))

        try:
            return prefill(self._sequence, prompt, self._loaded.chunking, on_progress)
        except Aborted:
            self._record(text, prompt, [])
            evaluated = max(len(self._sequence), cached) - cached
            prompt_ms = 1e3 * (perf_counter() - start)
            self._finish("cancelled", Timings(cache_n=cached, prompt_n=evaluated, prompt_ms=prompt_ms))
            return None

    def _decode(self, text: bytes, prompt: list[int], prefilled: Prefill) -> DecodeResult:
        command, speculator, sequence = self._command, self._loaded.speculator, self._sequence
        stream, is_eog = self._stream(text), self._vocab.is_eog
        self._sampler.begin(self._splitter(text))
        if speculator.begin_answer(command.speculation, prompt):
            decoder = SpeculativeDecoder(
                sequence, self._sampler, stream, is_eog, command.max_tokens, speculator, self._on_speculation
            )
            result = decoder.run(prefilled.row)
            self._speculation = speculator.figures()
            return result
        if speculator.disabled_reason:
            self._speculation = speculator.figures()
            self._on_speculation(0, self._speculation)
        return decode(sequence, prefilled.row, self._sampler, stream, is_eog, command.max_tokens)

    def _stream(self, text: bytes) -> TextStream | ThreadedStream:
        """Return the stream for the answer's text. With stop strings it runs on this thread, because a stop string ends
        the answer with the token that completes it.
        """
        stops = self._command.stop
        ends_itself = self._command.ignore_eos or self._command.grammar
        if self._loaded.template is None and self._command.prompt is None and not ends_itself:
            stops = (*stops, *PLAIN_STOPS)  # without a template only the next speaker's name shows the end
        splitter = Unsplit() if self._command.unsplit else self._splitter(text)
        if self._command.tools:
            splitter = self._calls = CallSplitter(splitter, self._call_format, self._command.tools)
        stream = TextStream(
            self._command.request_id,
            self._emit,
            self._vocab.piece if self._guide is None else self._guide.piece,
            splitter,
            stops,
            self._arrived,
            self._command.frame_seconds,
        )
        return stream if stops else ThreadedStream(self._output_thread, stream)

    def _splitter(self, text: bytes) -> ReasoningSplitter:
        splitter = self._new_splitter(text.decode("utf-8", "replace").removesuffix(self._continued))
        splitter.resume(self._continued.replace(MARK, ""))
        return splitter

    def _new_splitter(self, prompt: str) -> ReasoningSplitter:
        return ReasoningSplitter(prompt[-_PROMPT_TAIL:].replace(MARK, ""), self._loaded.model.header.chat_template)

    def _record(self, text: bytes, prompt: list[int], answer: list[int]) -> None:
        """Mark the KV cache as this chat's and worth saving; a rejected prompt never gets here."""
        loaded = self._loaded
        loaded.history.record(text, prompt, answer, self._vocab.raw_piece)
        loaded.chat_id = self._command.chat_id

    def _timings(self, prefilled: Prefill, result: DecodeResult, cpu_wait: float | None) -> Timings:
        n, speculation = len(result.tokens), self._speculation
        return Timings(
            cache_n=prefilled.cache_n,
            prompt_n=prefilled.prompt_n,
            prompt_ms=1e3 * prefilled.seconds if prefilled.prompt_n else 0.0,
            predicted_n=n,
            predicted_ms=1e3 * (result.last - result.first) if n else 0.0,
            ttft_ms=1e3 * (result.first - self._arrived) if n else 0.0,
            draft_n=speculation.draft_n if speculation else 0,
            draft_n_accepted=speculation.draft_n_accepted if speculation else 0,
            speculation=self._compared(speculation) if speculation else None,
            overhead_us=1e6 * result.overhead_seconds / n if n else 0.0,
            cpu_wait=cpu_wait,
        )

    def _look_at_cores(self) -> float | None:
        """Return the share of the decoding time for which the threads waited for a core; see `Timings`."""
        seconds = perf_counter() - self._decoding_since
        cpu_wait = cpu_wait_share(self._waited, seconds, self._loaded.model.info.n_threads)
        self._is_disturbed = (cpu_wait or 0.0) > MAX_CPU_WAIT
        return cpu_wait

    def _compared(self, figures: SpeculationFigures) -> SpeculationFigures:
        """Return the figures without a comparison with plain decoding if that was timed under other conditions."""
        if not self._is_disturbed or figures.plain_ms is None:
            return figures
        return msgspec.structs.replace(figures, plain_ms=None, disturbed=True)

    def _finish(self, stop_reason: StopReason, timings: Timings) -> None:
        sequence = self._sequence
        timings = msgspec.structs.replace(timings, n_past=len(sequence), n_ctx=sequence.n_ctx, seed=self._sampler.seed)
        self._emit(
            GenerationFinished(
                request_id=self._command.request_id,
                stop_reason=stop_reason,
                timings=timings,
                matches_grammar=self._sampler.matches_grammar,
                calls=self._calls.calls if self._calls is not None else (),
            )
        )

    def _on_speculation(self, predicted_n: int, figures: SpeculationFigures) -> None:
        if (now := perf_counter()) >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._look_at_cores()
        figures = self._compared(figures)
        self._emit(SpeculationUpdate(request_id=self._command.request_id, predicted_n=predicted_n, figures=figures))
