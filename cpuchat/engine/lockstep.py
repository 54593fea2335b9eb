"""The measuring process, `python -m cpuchat.engine.lockstep`: two or more models evaluate the same tokens in lockstep,
and their distributions are compared at once. Its messages are in `quality.messages`. All models must fit into memory
together, with one batch of logits per model: nothing of the size of vocabulary × text is kept.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.line_process import LineOutput
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model, available_for_model
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.engine.prompt.chat_template import ChatTemplate, TemplateHelper, plain_completion
from cpuchat.models.gguf.header import read_model
from cpuchat.models.ollama import file_name
from cpuchat.protocol.messages import LoadOptions, Message
from cpuchat.quality.messages import (
    Disagreement,
    Loading,
    Planned,
    QualityFinished,
    QualityStart,
    RowComparer,
    Scored,
    Text,
    Tops,
)
from cpuchat.quality.statistics import Scores

_ROWS_BYTES = 128 << 20
"""Logits of one batch of one model."""
_WORST = 10
_CONTEXT_TOKENS = 24


class Window(NamedTuple):
    """`tokens` of a text of this kind. The second half is scored, as by llama-perplexity: each of its tokens has at
    least half a window before it."""

    kind: str
    tokens: list[int]

    @property
    def first(self) -> int:
        """Index of the first token after which the next one is scored."""
        return len(self.tokens) // 2


class Lockstep:
    """One measurement. Made, run and closed on one thread, which also computes."""

    def __init__(self, start: QualityStart, output: LineOutput) -> None:
        self._start = start
        self._output = output
        self._abort = AbortFlag()
        n_vocab = read_model(Path(start.base)).n_vocab
        self._rows = max(min(_ROWS_BYTES // (4 * n_vocab), start.n_ctx // 2), 1)
        self._comparer = RowComparer(start.cpus, n_vocab)
        self._base: Model | None = None
        self._others: list[Model] = []

    def run(self) -> None:
        start = self._start
        base = self._base = self._load(start.base)
        windows = _windows(base.vocab, start.texts, start.n_ctx, base.header.chat_template)
        left = [set(range(len(windows))) - set(done) for done in start.done or [()] * len(start.others)]
        loaded = [i for i, missing in enumerate(left) if missing]
        taken = base.plan.need.min_bytes
        for number in loaded:
            self._others.append(self._load(start.others[number], taken))
            taken += self._others[-1].plan.need.min_bytes
        self._output.send(Planned(kinds=tuple(window.kind for window in windows)))
        for number, window in enumerate(windows):
            pairs = [(i, model) for i, model in zip(loaded, self._others, strict=True) if number in left[i]]
            if pairs:
                self._compare(base, pairs, number, window)
        self._output.send(QualityFinished())

    def close(self) -> None:
        for model in self._others:
            model.free()
        if self._base is not None:
            self._base.free()
        self._others, self._base = [], None
        self._comparer.close()

    def _load(self, path: str, taken: int = 0) -> Model:
        """`taken` bytes of memory are not to be counted on."""
        name = file_name(Path(path))
        pool = self._base.pool if self._base is not None else self._start.cpus

        def on_progress(_phase: str, done: int, total: int) -> None:
            if total > 1:  # else one step, such as the warm-up
                self._output.send(Loading(name=name, share=done / total))

        n_ctx = self._start.n_ctx
        options = LoadOptions(n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=min(n_ctx, 512), poll=0)
        return Model.load(
            Path(path),
            options,
            pool,
            on_progress=on_progress,
            abort=self._abort,
            available=available_for_model() - taken,
            n_outputs=self._rows,
        )

    def _compare(self, base: Model, pairs: list[tuple[int, Model]], number: int, window: Window) -> None:
        parts: dict[int, list[tuple[Scores, Tops]]] = {i: [] for i, _ in pairs}
        for model in (base, *(model for _, model in pairs)):
            model.sequence.clear()
            model.sequence.extend(window.tokens[: window.first])
        for start in range(window.first, len(window.tokens) - 1, self._rows):
            end = min(start + self._rows, len(window.tokens) - 1)
            base_rows = _evaluate(base, window, start, end)
            for i, model in pairs:
                rows = _evaluate(model, window, start, end)
                parts[i].append(self._comparer.compare(base_rows, rows, window.tokens[start + 1 : end + 1]))
        for other, scored in parts.items():
            scores, tops = Scores.joined([scores for scores, _ in scored]), Tops.joined([tops for _, tops in scored])
            differing, worst = np.flatnonzero(scores.same_top == 0), list[Disagreement]()
            for i in differing[np.argsort(-scores.kld[differing], kind="stable")][:_WORST]:
                at = window.first + int(i)
                worst.append(
                    Disagreement(
                        kld=float(scores.kld[i]),
                        context=_text(base.vocab, window.tokens[max(at + 1 - _CONTEXT_TOKENS, 0) : at + 1]),
                        token=_text(base.vocab, [window.tokens[at + 1]]),
                        base_top=_text(base.vocab, [int(tops.base[i])]),
                        base_p=float(tops.base_p[i]),
                        other_top=_text(base.vocab, [int(tops.other[i])]),
                        other_p=float(tops.other_p[i]),
                    )
                )
            self._output.send(Scored(other=other, window=number, worst=tuple(worst), **scores.packed()))


def _evaluate(model: Model, window: Window, start: int, end: int) -> list[np.ndarray]:
    model.sequence.extend(window.tokens[start:end], n_outputs=end - start)
    return [model.sequence.logits(i) for i in range(end - start)]


def _windows(vocab: Vocab, texts: Sequence[Text], n_ctx: int, template: str) -> list[Window]:
    """Cut the texts into windows of `n_ctx` tokens, the kinds in turn, so that an early estimate covers all. Raises
    UsageError: no text is that long; TemplateError, GenerationFailed: a text cannot be rendered or tokenized."""
    start = vocab.tokenize(b"", add_special=True)[:1]
    by_kind: list[list[Window]] = []
    longest = 0
    for text in texts:
        tokens = _tokens(vocab, text, template)
        longest = max(longest, len(tokens))
        cut = [tokens[at : at + n_ctx] for at in range(0, len(tokens) - n_ctx + 1, n_ctx)]
        # Each window begins as the model was trained to begin.
        by_kind.append([Window(text.kind, start + part[len(start) :]) for part in cut])
    windows = [window for turn in zip_longest(*by_kind) for window in turn if window is not None]
    if not windows:
        raise UsageError(
            f"The text has {longest:,} tokens, less than one window of {n_ctx:,}.",
            "Give a longer text, or a smaller --ctx.",
        )
    return windows


def _tokens(vocab: Vocab, text: Text, template: str) -> list[int]:
    if not text.dialogues:
        marked = vocab.mark_content(Message(role="user", content=text.content)).content
        return vocab.tokenize_prompt(marked.encode())
    marked = [[vocab.mark_content(message) for message in dialogue] for dialogue in text.dialogues]
    if not template:
        rendered = [plain_completion(dialogue) for dialogue in marked]
    else:
        with contextlib.closing(TemplateHelper(template)) as helper:
            chat = ChatTemplate(helper, vocab.bos_text, vocab.eos_text)
            rendered = [chat.render(dialogue) for dialogue in marked]
    return [token for dialogue in rendered for token in vocab.tokenize_prompt(dialogue.encode())]


def _text(vocab: Vocab, tokens: list[int]) -> str:
    return b"".join(map(vocab.raw_piece, tokens)).decode("utf-8", "replace")


def main() -> None:
    output = LineOutput.claim()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=prepared(QualityStart))
    # The process ends when its input ends: llama.cpp's calls cannot be waited for.
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    try:
        with contextlib.closing(Lockstep(start, output)) as lockstep:
            lockstep.run()
    except CpuchatError as error:
        output.refuse(error)


if __name__ == "__main__":
    main()
