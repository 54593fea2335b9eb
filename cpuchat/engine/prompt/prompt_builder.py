"""From the messages of a request to the tokens of its prompt, without the oldest ones where they do not fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import msgspec

from cpuchat.base.errors import ContextFull, UsageError
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.engine.prompt.fill_in import fill_prompt
from cpuchat.engine.states.prompt import RenderedPrompt, TokenHistory
from cpuchat.protocol.messages import ANSWER_SHARE, FillIn, Message


class TrimResult(msgspec.Struct, frozen=True):
    """The remaining messages, and how much was dropped (in tokens of the rendered prompt)."""

    messages: list[Message]
    dropped_messages: int
    dropped_tokens: int


def trim_messages(
    count: Callable[[list[Message]], int],
    messages: Sequence[Message],
    budget: int,
    in_steps: bool = True,
    limit: int | None = None,
) -> TrimResult:
    """Drop the oldest turns until the prompt fits, but neither system messages nor the last user message and what
    follows; the first other message that stays is the user's.

    Turns are dropped in steps of a quarter of the budget: if only the overflow was dropped, a full chat's prompt would
    begin differently at every turn, and nothing of the KV cache be reused. Without `in_steps` only the overflow is, for
    a prompt that none continues.

    `count`: returns the tokens of a prompt; called about log2(turns) + 2 times. `budget`: tokens that the prompt may
    have: the context less the room for the answer. `limit`: those of what must stay (None: `budget`). Raises
    ContextFull: that is longer."""
    everything = list(messages)
    total = count(everything)
    if total <= budget:
        return TrimResult(everything, 0, 0)
    starts = [i for i, m in enumerate(everything) if m.role == "user"]
    step = max(1, budget // 4) if in_steps else 1
    goal = total - -(-(total - budget) // step) * step
    # The oldest start that reaches the goal; a long last turn misses it but may still fit.
    oldest = bisect_left(
        starts, True, 1, max(len(starts) - 1, 1), key=lambda start: count(_kept_from(everything, start)) <= goal
    )
    kept = _kept_from(everything, starts[min(oldest, len(starts) - 1)]) if starts else everything
    size = count(kept)
    limit = budget if limit is None else limit
    if size > limit:
        raise _too_long(count, everything, size, limit)
    return TrimResult(kept, len(everything) - len(kept), total - size)


def require_room_for_last(count: Callable[[list[Message]], int], messages: Sequence[Message], budget: int) -> None:
    """Raise ContextFull if what `trim_messages` leaves at least is longer than `budget`."""
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
    kept = _kept_from(messages, last)
    if (size := count(kept)) > budget:
        raise _too_long(count, kept, size, budget)


def _kept_from(messages: Sequence[Message], start: int) -> list[Message]:
    """Return the system messages, and all from `start` on."""
    return [m for i, m in enumerate(messages) if i >= start or m.role == "system"]


def _too_long(count: Callable[[list[Message]], int], messages: list[Message], needed: int, budget: int) -> ContextFull:
    system = [m for m in messages if m.role == "system"]
    last = [m for m in messages if m.role != "system"][-1:]
    alone = count(last) if system and last and last[0].role == "user" else needed
    share = f" ({needed - alone:,} of them for the system prompt)" if alone < needed else ""
    return ContextFull(
        f"The last message needs {needed:,} tokens{share}, but the context has room for {max(0, budget):,}.",
        "Shorten it.",
        alone=True,
    )


_TRIMMED_SHARE = 4  # in place of `ANSWER_SHARE`: of a chat whose oldest turns are left out


class PromptBuilder:
    """Renders and tokenizes one prompt for a context of `n_ctx` tokens; of the `histories` the one that shares most
    with it gives the tokens that the model generated itself. `render` may raise TemplateError. `abort` lets it raise
    Aborted."""

    def __init__(
        self,
        vocab: Vocab,
        render: Callable[[list[Message]], str],
        histories: Iterable[TokenHistory],
        n_ctx: int,
        abort: AbortFlag,
    ) -> None:
        self._abort = abort
        self._vocab = vocab
        self._render_text = render
        self._histories = tuple(histories)
        self._n_ctx = n_ctx
        self._rendered: tuple[list[Message], bytes] = ([], b"")
        self._encoded: tuple[bytes, list[int]] = (b"", [])

    def from_text(self, prompt: str) -> RenderedPrompt:
        """Return a raw prompt. Raises ContextFull: it is too long; UsageError: it has no tokens."""
        return self._checked(prompt.encode("utf-8", "replace"))

    def from_fill(self, before: str, fill: FillIn, max_tokens: int) -> RenderedPrompt:
        """Return the prompt for a text between two others, of which so much is left out that `max_tokens` fit. Raises
        UsageError: the model cannot fill in."""
        if (tokens := self._vocab.fill_tokens) is None:
            raise UsageError(
                "This model cannot fill in the middle of a text: its vocabulary has no tokens for that.",
                "Load one that was trained for it, such as Qwen2.5 Coder.",
            )

        def count(text: str) -> int:
            self._stop_if_aborted()
            return len(self._vocab.tokenize(self._vocab.mark_text(text).encode("utf-8", "replace"), add_special=False))

        room = self._n_ctx - self._reserve(max_tokens, _TRIMMED_SHARE)
        return self._checked(fill_prompt(tokens, before, fill, room, count, self._vocab.mark_text).encode())

    def count(self, messages: Iterable[Message]) -> int:
        """Return the tokens of a prompt, also of one that is too long. Raises TemplateError."""
        return self._count(self._marked(messages))

    def from_messages(
        self, messages: Iterable[Message], max_tokens: int, *, in_steps: bool = True
    ) -> tuple[RenderedPrompt, TrimResult]:
        """Return the rendered prompt, and what of the oldest messages was left out. `max_tokens`: of the answer, 0 = no
        limit; up to a quarter of the context is reserved for it, an eighth if the last message needs more. `in_steps`
        as of `trim_messages`. Raises ContextFull: the last message alone is too long; TemplateError."""
        marked = self._marked(messages)
        budget = self._n_ctx - self._reserve(max_tokens, _TRIMMED_SHARE)
        limit = self._n_ctx - self._reserve(max_tokens, ANSWER_SHARE)
        trimmed = trim_messages(self._count, marked, budget, in_steps, limit)
        text = self._render(trimmed.messages)
        return self._checked(text, trimmed.messages, trimmed.dropped_messages > 0), trimmed

    def from_all_messages(self, messages: Iterable[Message], max_tokens: int | None = None) -> RenderedPrompt:
        """Return the rendered prompt of all messages. `max_tokens`: of the answer, 0 = no limit; up to an eighth of the
        context is reserved for it; None: nothing is. Raises ContextFull, TemplateError."""
        marked = self._marked(messages)
        reserve = 0 if max_tokens is None else self._reserve(max_tokens, ANSWER_SHARE)
        if reserve and (n_tokens := self._count(marked)) > self._n_ctx - reserve:
            require_room_for_last(self._count, marked, self._n_ctx - reserve)
            raise ContextFull(
                f"The chat has {n_tokens:,} tokens; with {reserve:,} for the answer it exceeds the context "
                f"of {self._n_ctx:,}.",
                "Summarize it with /compact or start a new chat.",
                n_tokens,
            )
        return self._checked(self._render(marked), marked)

    def _marked(self, messages: Iterable[Message]) -> list[Message]:
        marked: list[Message] = []
        for message in messages:
            self._stop_if_aborted()
            marked.append(self._vocab.mark_content(message))
        return marked

    def _stop_if_aborted(self) -> None:
        if self._abort.is_set():
            raise Aborted

    def _reserve(self, max_tokens: int, share: int) -> int:
        """Return the tokens that are kept for the answer: one in `share` of the context at most."""
        max_n_tokens = self._n_ctx // share
        return max(min(max_tokens or max_n_tokens, max_n_tokens), 1)

    def _count(self, messages: list[Message]) -> int:
        return len(self._encode(self._render(messages)))

    def _checked(self, text: bytes, messages: Iterable[Message] = (), is_trimmed: bool = False) -> RenderedPrompt:
        tokens = self._encode(text, self._n_ctx)
        if not tokens:  # an empty prompt, and a model without a begin token
            raise UsageError("The prompt is empty.", "Write one first.")
        if len(tokens) >= self._n_ctx:
            raise self._too_long(len(tokens))
        return RenderedPrompt(text, tokens, tuple(messages), is_trimmed)

    def _too_long(self, n_tokens: int, about: str = "") -> ContextFull:
        message = f"The prompt has {about}{n_tokens:,} tokens, but the context holds only {self._n_ctx:,}."
        return ContextFull(message, "Shorten the prompt.", n_tokens)

    def _render(self, messages: list[Message]) -> bytes:
        if messages != self._rendered[0]:
            self._rendered = messages, self._render_text(messages).encode("utf-8", "replace")
        return self._rendered[1]

    def _encode(self, text: bytes, max_n_tokens: int | None = None) -> list[int]:
        """Return the tokens of a prompt. Raises ContextFull once there are `max_n_tokens`, with about how many."""

        def tokenize(part: bytes, at_start: bool) -> list[int]:
            def check(n_tokens: int, n_bytes: int) -> None:
                self._stop_if_aborted()
                if max_n_tokens is not None and n_tokens >= max_n_tokens and n_bytes < len(part):
                    raise self._too_long(n_tokens * len(part) // n_bytes, "about ")

            if at_start:
                return self._vocab.tokenize_prompt(part, check)
            return self._vocab.tokenize(part, add_special=False, check=check)

        if text != self._encoded[0]:
            history = max(self._histories, key=lambda one: one.shared(text))
            self._encoded = text, history.encode(text, tokenize, self._vocab.raw_piece)
        return self._encoded[1]
