"""One request on its way from messages to the last event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, Protocol

import msgspec

from cpuchat.engine.decoding.decode import Prefill, Written, prefill, write
from cpuchat.engine.decoding.prefill_chunking import PrefillChunking
from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.engine.decoding.speculative import write_drafted
from cpuchat.engine.drafting.speculator import Speculator
from cpuchat.engine.llama.control_text import MARK
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.engine.llama.threads import waited_seconds
from cpuchat.engine.prompt.chat_template import PLAIN_STOPS, plain_completion
from cpuchat.engine.prompt.disk_writer import WriteBudget
from cpuchat.engine.prompt.prefix_cache import PrefixCache, SavedChat
from cpuchat.engine.prompt.token_history import Continuation
from cpuchat.engine.prompt.trim import fit_messages
from cpuchat.engine.text.detokenizer import Detokenizer
from cpuchat.engine.text.output_thread import Scribe, ThreadedStream
from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.text_stream import TextStream
from cpuchat.errors import ContextFull, UsageError
from cpuchat.prefix import common_prefix
from cpuchat.protocol import (
    ContextTrimmed,
    Event,
    Generate,
    GenerationFinished,
    Message,
    PrefillProgress,
    SpeculationUpdate,
)
from cpuchat.timings import SpeculationFigures, Timings

_OTHER_CHATS: Final = 1 << 16
"""Tokens of other chats that suffix decoding looks into."""
_SAVE_SHARE: Final = 4
"""A chat is saved again when the new part of it is this fraction of the whole."""
_RESTORE_GAIN: Final = 32
"""A saved state is loaded only if it spares the evaluation of at least this many tokens."""


class Renders(Protocol):
    """A chat template."""

    def render(self, messages: list[Message]) -> str:
        """Raises TemplateError."""
        ...


@dataclass
class Loaded:
    """A model and what is known about the chat in its KV cache.

    `template` None: the model has none. `chat_id` "": the chat has no name and is not saved. `kept`: the tokens of this
    chat whose KV is saved. `knows_others`: the speculator was told the texts of other chats.
    """

    model: Model
    template: Renders | None
    cache: PrefixCache | None
    continuation: Continuation
    speculator: Speculator
    chunking: PrefillChunking
    budget: WriteBudget
    chat_id: str = ""
    kept: list[int] = field(default_factory=list)
    knows_others: bool = False

    def save(self, *, at_end: bool = False) -> None:
        """Save the KV of the chat in memory if enough of it would be lost.

        A state is written whole, so a long chat is written again only when it has grown by a third: in all, that is at
        most four times what came to it, whatever its length. What is lost meanwhile costs its prefill. `at_end`:
        nothing but this will keep it, and it is saved if it is worth restoring.
        """
        if self.cache is None or not self.chat_id:
            return
        sequence = self.model.sequence
        held = common_prefix(sequence.tokens, self.kept)
        if held < len(self.kept) and not sequence.can_roll_back:
            held = 0  # what is saved goes on differently
        new = len(sequence) - held
        if new >= _RESTORE_GAIN if at_end else new * _SAVE_SHARE >= len(sequence) and self.budget.allows():
            written = self.cache.save(self.chat_id, sequence, self.continuation)
            if written:
                self.kept = list(sequence.tokens)
                self.budget.spend(written)

    def forget(self, chat_id: str) -> None:
        """Drop what was said in a chat, here and on disk, and draft from it no more; that of others is read again."""
        current = self.chat_id in (chat_id, "")  # without a name it may be what is left of that one
        if current:
            self.model.sequence.clear()
            self.continuation = Continuation()
            self.chat_id, self.kept = "", []
        self.speculator.forget(current=current)  # it may be among the texts that it knows
        self.knows_others = False
        if self.cache is not None:
            self.cache.forget(chat_id)

    def remember_chats(self, next_id: str) -> None:
        """Tell the speculator what other chats said: those on disk at first, then each one that is left."""
        if not self.knows_others and self.cache is not None:
            for text in reversed(self.cache.recent_texts(_OTHER_CHATS, without=next_id)):
                self.speculator.remember(text)
        self.speculator.remember(self.continuation.tokens)
        self.knows_others = True


class Answer:
    """One request on its way from messages to the last event."""

    def __init__(
        self, loaded: Loaded, command: Generate, arrived: float, emit: Callable[[Event], None], scribe: Scribe
    ) -> None:
        self._loaded = loaded
        self._scribe = scribe
        self._command = command
        self._arrived = arrived
        self._emit = emit
        self._vocab = loaded.model.vocab
        self._sequence = loaded.model.sequence
        self._sampler = Sampler(command.sampling, self._vocab.n_tokens)
        self._saved: SavedChat | None = None
        self._rendered: tuple[list[Message], bytes] = ([], b"")
        self._encoded: tuple[bytes, list[int]] = (b"", [])

    def run(self) -> None:
        """Raises CpuchatError when the request cannot be answered."""
        command, loaded, sequence = self._command, self._loaded, self._sequence
        if command.chat_id != loaded.chat_id:
            loaded.save()
            if command.speculation.across_chats:
                loaded.remember_chats(command.chat_id)
            loaded.chat_id = ""  # until the new chat's text is in the cache, what is there belongs to nobody
            self._saved = loaded.cache.find(command.chat_id) if loaded.cache and command.chat_id else None
            loaded.kept = self._saved.tokens if self._saved is not None else []
        text, prompt = self._prompt()
        self._restore(text, prompt)
        written = Written(stop_reason="cancelled")
        filled: Prefill | None = None
        speculation: SpeculationFigures | None = None
        started = perf_counter()
        cached = [0, 0]

        def progress(processed: int, cache_n: int) -> None:
            cached[:] = processed, cache_n
            self._emit(
                PrefillProgress(request_id=command.request_id, processed=processed, total=len(prompt), cache_n=cache_n)
            )

        try:
            filled = prefill(sequence, prompt, loaded.chunking, progress)
        except Aborted:
            self._record(text, prompt, [])
            processed = max(len(sequence), cached[1])
            timings = Timings(
                cache_n=cached[1], prompt_n=processed - cached[1], prompt_ms=1e3 * (perf_counter() - started)
            )
            self._finish(written, timings)
            return
        try:
            self._sampler.accept_prompt(prompt)
            stops = self._stops()
            stream = TextStream(
                command.request_id,
                self._emit,
                Detokenizer(self._vocab.piece),
                ReasoningSplitter(
                    text[-200:].decode("utf-8", "replace").replace(MARK, ""), loaded.model.header.chat_template
                ),
                stops,
                self._arrived,
            )
            # A stop string ends the answer with the token that completes it, so then the text is waited for.
            out = stream if stops else ThreadedStream(self._scribe, stream)
            end, limit = self._vocab.is_eog, command.max_tokens
            waited, started = waited_seconds(), perf_counter()
            if loaded.speculator.begin(command.speculation, prompt):
                written = write_drafted(
                    sequence, filled.row, self._sampler, out, end, limit, loaded.speculator, self._tell_speculation
                )
                speculation = loaded.speculator.figures()
            else:
                if loaded.speculator.why_not:
                    speculation = loaded.speculator.figures()
                    self._tell_speculation(0, speculation)
                written = write(sequence, filled.row, self._sampler, out, end, limit)
            cpu_wait = self._cpu_wait(waited, perf_counter() - started)
        finally:
            self._record(text, prompt, written.tokens)
        n = len(written.tokens)
        self._finish(
            written,
            Timings(
                cache_n=filled.cache_n,
                prompt_n=filled.prompt_n,
                prompt_ms=1e3 * filled.seconds if filled.prompt_n else 0.0,
                predicted_n=n,
                predicted_ms=1e3 * (written.last - written.first) if n else 0.0,
                ttft_ms=1e3 * (written.first - self._arrived) if n else 0.0,
                draft_n=speculation.draft_n if speculation else 0,
                draft_n_accepted=speculation.draft_n_accepted if speculation else 0,
                speculation=speculation,
                overhead_us=1e6 * written.overhead_seconds / n if n else 0.0,
                cpu_wait=cpu_wait,
            ),
        )

    def _cpu_wait(self, before: float | None, seconds: float) -> float | None:
        """As of `Timings`, over the last `seconds`."""
        after = waited_seconds()
        if before is None or after is None or seconds <= 0:
            return None
        return max(0.0, after - before) / (seconds * self._loaded.model.info.n_threads)

    def _record(self, text: bytes, prompt: list[int], answer: list[int]) -> None:
        """From here on what is in memory is this chat's, and worth saving; a refused prompt never gets here."""
        loaded = self._loaded
        loaded.continuation.record(text, prompt, answer, self._vocab.raw_piece)
        loaded.chat_id = self._command.chat_id

    def _finish(self, written: Written, timings: Timings) -> None:
        timings = msgspec.structs.replace(
            timings, n_past=len(self._sequence), n_ctx=self._sequence.n_ctx, seed=self._sampler.seed
        )
        self._emit(
            GenerationFinished(request_id=self._command.request_id, stop_reason=written.stop_reason, timings=timings)
        )

    def _tell_speculation(self, predicted_n: int, figures: SpeculationFigures) -> None:
        self._emit(SpeculationUpdate(request_id=self._command.request_id, predicted_n=predicted_n, figures=figures))

    def _prompt(self) -> tuple[bytes, list[int]]:
        """The rendered prompt and its tokens; tells when messages had to be left out.

        Raises:
            ContextFull: the prompt, or the last message alone, is too long.
            TemplateError: the model's template failed.
            UsageError: there is nothing to answer.
        """
        command, n_ctx = self._command, self._sequence.n_ctx
        if command.prompt is not None:
            text = command.prompt.encode("utf-8", "replace")
        elif command.messages:
            reserve = max(min(command.max_tokens or n_ctx // 4, n_ctx // 4), 1)
            messages = [self._vocab.mark_content(message) for message in command.messages]
            fit = fit_messages(lambda m: len(self._encode(self._render(m))), messages, n_ctx - reserve)
            if fit.dropped_messages:
                self._emit(
                    ContextTrimmed(
                        request_id=command.request_id,
                        dropped_messages=fit.dropped_messages,
                        dropped_tokens=fit.dropped_tokens,
                        n_ctx=n_ctx,
                    )
                )
            text = self._render(fit.messages)
        else:
            raise UsageError("There is no message to answer.", "Write something first.")
        tokens = self._encode(text)
        if not tokens:
            # A model without a begin token and an empty prompt: there is nothing to go on from.
            raise UsageError("The prompt is empty.", "Write something first.")
        if len(tokens) >= n_ctx:
            raise ContextFull(
                f"The prompt has {len(tokens)} tokens and the context has room for {n_ctx}.",
                "Shorten it or raise --ctx.",
            )
        return text, tokens

    def _stops(self) -> tuple[str, ...]:
        """Without a template only the next speaker's name shows that the answer is over."""
        plain = self._loaded.template is None and self._command.prompt is None
        return (*self._command.stop, *PLAIN_STOPS) if plain else self._command.stop

    def _render(self, messages: list[Message]) -> bytes:
        if messages != self._rendered[0]:
            template = self._loaded.template
            text = plain_completion(messages) if template is None else template.render(messages)
            self._rendered = messages, text.encode("utf-8", "replace")
        return self._rendered[1]

    def _encode(self, text: bytes) -> list[int]:
        """Tokens of a prompt, with those that the model wrote itself as it wrote them."""
        if text != self._encoded[0]:
            known = self._loaded.continuation
            if self._saved is not None and self._saved.continuation.shared(text) > known.shared(text):
                known = self._saved.continuation
            self._encoded = text, known.encode(text, self._tokenize, self._vocab.raw_piece)
        return self._encoded[1]

    def _tokenize(self, text: bytes, at_start: bool) -> list[int]:
        return self._vocab.tokenize_prompt(text) if at_start else self._vocab.tokenize(text, add_special=False)

    def _restore(self, text: bytes, prompt: list[int]) -> None:
        """Load the saved KV of this chat if it holds more of the prompt than the memory does."""
        saved, loaded, sequence = self._saved, self._loaded, self._sequence
        if saved is None or loaded.cache is None:
            return
        if saved.continuation.shared(text) > loaded.continuation.shared(text):
            loaded.continuation = saved.continuation
        from_disk = common_prefix(saved.tokens, prompt)
        if not sequence.can_roll_back and from_disk < len(saved.tokens):
            return
        if from_disk - common_prefix(sequence.tokens, prompt) < _RESTORE_GAIN:
            return
        loaded.cache.restore(self._command.chat_id, saved, sequence)
