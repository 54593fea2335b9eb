"""From the messages of a request to the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cpuchat.engine.llama.vocab import Vocab
from cpuchat.engine.prompt.token_history import TokenHistory
from cpuchat.engine.prompt.trim import TrimResult, trim_messages
from cpuchat.errors import ContextFull, UsageError
from cpuchat.protocol import Message


class PromptBuilder:
    """Renders and tokenizes one prompt; tokens that the model generated itself are reused as it generated them.

    Args:
        render: a prompt from messages. Raises TemplateError.
        histories: texts whose tokens are known; the one that shares most with the prompt is used.
        n_ctx: tokens of the context.
    """

    def __init__(
        self, vocab: Vocab, render: Callable[[list[Message]], str], histories: Iterable[TokenHistory], n_ctx: int
    ) -> None:
        self._vocab = vocab
        self._render_text = render
        self._histories = tuple(histories)
        self._n_ctx = n_ctx
        self._rendered: tuple[list[Message], bytes] = ([], b"")
        self._encoded: tuple[bytes, list[int]] = (b"", [])

    def from_text(self, prompt: str) -> tuple[bytes, list[int]]:
        """Return a raw prompt as bytes, and its tokens.

        Raises:
            ContextFull: it is too long.
            UsageError: it has no tokens.
        """
        return self._checked(prompt.encode("utf-8", "replace"))

    def from_messages(
        self, messages: Iterable[Message], max_tokens: int, on_trimmed: Callable[[TrimResult], None]
    ) -> tuple[bytes, list[int]]:
        """Return the rendered prompt and its tokens; oldest messages are left out where the context is too small.

        Args:
            max_tokens: of the answer, 0 = no limit; up to a quarter of the context is reserved for it.
            on_trimmed: called with what was dropped.

        Raises:
            ContextFull: the last message alone is too long.
            TemplateError: the model's template failed.
        """
        marked = [self._vocab.mark_content(message) for message in messages]
        trimmed = trim_messages(
            lambda m: len(self._encode(self._render(m))), marked, self._n_ctx - self._reserve(max_tokens)
        )
        if trimmed.dropped_messages:
            on_trimmed(trimmed)
        return self._checked(self._render(trimmed.messages))

    def from_all_messages(self, messages: Iterable[Message], max_tokens: int | None = None) -> tuple[bytes, list[int]]:
        """Return the rendered prompt and its tokens; nothing is left out.

        Args:
            max_tokens: of the answer, as of `from_messages`, if it must leave room for that.

        Raises:
            ContextFull: it is too long.
            TemplateError: the model's template failed.
        """
        text, tokens = self._checked(self._render([self._vocab.mark_content(message) for message in messages]))
        reserve = 0 if max_tokens is None else self._reserve(max_tokens)
        if len(tokens) > self._n_ctx - reserve:
            raise ContextFull(
                f"The chat has {len(tokens):,} tokens; with {reserve:,} for the answer it exceeds the context "
                f"of {self._n_ctx:,}.",
                "Summarize it with /compact, start a new chat, or raise --ctx.",
                len(tokens),
            )
        return text, tokens

    def _reserve(self, max_tokens: int) -> int:
        """Return the tokens that are kept for the answer."""
        quarter = self._n_ctx // 4
        return max(min(max_tokens or quarter, quarter), 1)

    def _checked(self, text: bytes) -> tuple[bytes, list[int]]:
        tokens = self._encode(text)
        if not tokens:  # an empty prompt, and a model without a begin token
            raise UsageError("The prompt is empty.", "Write one first.")
        if len(tokens) >= self._n_ctx:
            raise ContextFull(
                f"The prompt has {len(tokens):,} tokens, but the context holds only {self._n_ctx:,}.",
                "Shorten the prompt or raise --ctx.",
                len(tokens),
            )
        return text, tokens

    def _render(self, messages: list[Message]) -> bytes:
        if messages != self._rendered[0]:
            self._rendered = messages, self._render_text(messages).encode("utf-8", "replace")
        return self._rendered[1]

    def _encode(self, text: bytes) -> list[int]:
        if text != self._encoded[0]:
            history = max(self._histories, key=lambda one: one.shared(text))
            self._encoded = text, history.encode(text, self._tokenize, self._vocab.raw_piece)
        return self._encoded[1]

    def _tokenize(self, text: bytes, at_start: bool) -> list[int]:
        return self._vocab.tokenize_prompt(text) if at_start else self._vocab.tokenize(text, add_special=False)
