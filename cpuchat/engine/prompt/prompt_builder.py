"""From the messages of a request to the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cpuchat.engine.llama.vocab import Vocab
from cpuchat.engine.prompt.trim import TrimResult, require_room_for_last, trim_messages
from cpuchat.engine.states.prompt import Prompt
from cpuchat.engine.states.token_history import TokenHistory
from cpuchat.errors import ContextFull, UsageError
from cpuchat.protocol import ANSWER_SHARE, Message

_TRIMMED_SHARE = 4  # in place of `ANSWER_SHARE`: of a chat whose oldest turns are left out


class PromptBuilder:
    """Renders and tokenizes one prompt; tokens that the model generated itself are reused as it generated them.

    Args:
        render: a prompt from messages. Raises TemplateError.
        histories: texts whose tokens are known; the one that shares most with the prompt is used.
        n_ctx: tokens of the context.
        check: called again and again; what it raises ends the work.
    """

    def __init__(
        self,
        vocab: Vocab,
        render: Callable[[list[Message]], str],
        histories: Iterable[TokenHistory],
        n_ctx: int,
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._vocab = vocab
        self._render_text = render
        self._histories = tuple(histories)
        self._n_ctx = n_ctx
        self._rendered: tuple[list[Message], bytes] = ([], b"")
        self._encoded: tuple[bytes, list[int]] = (b"", [])

    def from_text(self, prompt: str) -> Prompt:
        """Return a raw prompt.

        Raises:
            ContextFull: it is too long.
            UsageError: it has no tokens.
        """
        return self._checked(prompt.encode("utf-8", "replace"))

    def from_messages(
        self,
        messages: Iterable[Message],
        max_tokens: int,
        on_trimmed: Callable[[TrimResult], None],
        *,
        in_steps: bool = True,
    ) -> Prompt:
        """Return the rendered prompt; oldest messages are left out where the context is too small.

        Args:
            max_tokens: of the answer, 0 = no limit; up to a quarter of the context is reserved for it, an eighth if
                the last message needs more than is left.
            on_trimmed: called with what was dropped.
            in_steps: as of `trim_messages`.

        Raises:
            ContextFull: the last message alone is too long.
            TemplateError: the model's template failed.
        """
        marked = self._marked(messages)
        budget = self._n_ctx - self._reserve(max_tokens, _TRIMMED_SHARE)
        limit = self._n_ctx - self._reserve(max_tokens, ANSWER_SHARE)
        trimmed = trim_messages(self._count, marked, budget, in_steps, limit)
        if trimmed.dropped_messages:
            on_trimmed(trimmed)
        return self._checked(self._render(trimmed.messages), trimmed.messages, trimmed.dropped_messages > 0)

    def from_all_messages(self, messages: Iterable[Message], max_tokens: int | None = None) -> Prompt:
        """Return the rendered prompt; nothing is left out.

        Args:
            max_tokens: of the answer, 0 = no limit; up to an eighth of the context is reserved for it. None: no room
                is left for an answer.

        Raises:
            ContextFull: it is too long.
            TemplateError: the model's template failed.
        """
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
            self._check()
            marked.append(self._vocab.mark_content(message))
        return marked

    def _reserve(self, max_tokens: int, share: int) -> int:
        """Return the tokens that are kept for the answer: one in `share` of the context at most."""
        most = self._n_ctx // share
        return max(min(max_tokens or most, most), 1)

    def _count(self, messages: list[Message]) -> int:
        return len(self._encode(self._render(messages)))

    def _checked(self, text: bytes, messages: Iterable[Message] = (), is_trimmed: bool = False) -> Prompt:
        tokens = self._encode(text, self._n_ctx)
        if not tokens:  # an empty prompt, and a model without a begin token
            raise UsageError("The prompt is empty.", "Write one first.")
        if len(tokens) >= self._n_ctx:
            raise self._too_long(len(tokens))
        return Prompt(text, tokens, tuple(messages), is_trimmed)

    def _too_long(self, n_tokens: int, about: str = "") -> ContextFull:
        message = f"The prompt has {about}{n_tokens:,} tokens, but the context holds only {self._n_ctx:,}."
        return ContextFull(message, "Shorten the prompt.", n_tokens)

    def _render(self, messages: list[Message]) -> bytes:
        if messages != self._rendered[0]:
            self._rendered = messages, self._render_text(messages).encode("utf-8", "replace")
        return self._rendered[1]

    def _encode(self, text: bytes, most: int | None = None) -> list[int]:
        """Return the tokens of a prompt. Raises ContextFull once there are `most`, with about how many it has."""

        def tokenize(part: bytes, at_start: bool) -> list[int]:
            def check(n_tokens: int, n_bytes: int) -> None:
                self._check()
                if most is not None and n_tokens >= most and n_bytes < len(part):
                    raise self._too_long(n_tokens * len(part) // n_bytes, "about ")

            if at_start:
                return self._vocab.tokenize_prompt(part, check)
            return self._vocab.tokenize(part, add_special=False, check=check)

        if text != self._encoded[0]:
            history = max(self._histories, key=lambda one: one.shared(text))
            self._encoded = text, history.encode(text, tokenize, self._vocab.raw_piece)
        return self._encoded[1]
