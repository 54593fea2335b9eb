"""The measuring process, `python -m cpuchat.engine.lockstep`: two or more models evaluate the same tokens in lockstep,
and their distributions are compared at once. Its messages are in `quality.messages`.

Nothing of the size of vocabulary × text is kept: memory is bounded by one batch of logits per model. Only where the
models do not fit into memory together are they loaded in turn, and the base's logits kept for as many windows as memory
allows.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, DoesNotFit, UsageError
from cpuchat.base.line_process import LineOutput
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model, available_for_model
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.engine.prompt.chat_template import ChatTemplate, TemplateHelper, plain_completion
from cpuchat.models.gguf.header import read_model
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
_SPARE = 0.8
"""Share of the free memory that the base's logits may take when the models are loaded in turn."""


class Window(NamedTuple):
    """`tokens` of a text of this kind. The second half is scored, as by llama-perplexity: each of its tokens has at
    least half a window before it."""

    kind: str
    tokens: list[int]

    @property
    def first(self) -> int:
        """Index of the first token after which the next one is scored."""
        return len(self.tokens) // 2

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield index ranges of the tokens after which the next one is scored, at most `rows` long."""
        end = len(self.tokens) - 1
        for start in range(self.first, end, rows):
            yield start, min(start + rows, end)


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
        """Raises CpuchatError."""
        start = self._start
        base = self._base = self._load(start.base)
        windows = _windows(base.vocab, start.texts, start.n_ctx, base.header.chat_template)
        left = [set(range(len(windows))) - set(done) for done in start.done or [()] * len(start.others)]
        note = self._load_others([i for i, missing in enumerate(left) if missing])
        self._output.send(Planned(kinds=tuple(window.kind for window in windows), note=note))
        if note:
            for i, missing in enumerate(left):
                self._in_turn(i, windows, sorted(missing))
        else:
            loaded = [i for i, missing in enumerate(left) if missing]
            for number, window in enumerate(windows):
                pairs = [(i, model) for i, model in zip(loaded, self._others, strict=True) if number in left[i]]
                if pairs:
                    self._together(base, pairs, number, window)
        self._output.send(QualityFinished())

    def close(self) -> None:
        """Free everything."""
        for model in self._others:
            model.free()
        if self._base is not None:
            self._base.free()
        self._others, self._base = [], None
        self._comparer.close()

    def _load(self, path: str, taken: int = 0) -> Model:
        """`taken` bytes of memory are not to be counted on."""
        name = Path(path).name
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

    def _load_others(self, numbers: list[int]) -> str:
        """Load the others beside the base; where they do not fit, free them and return a note that says so."""
        assert self._base is not None
        taken = self._base.plan.need.min_bytes
        try:
            for number in numbers:
                self._others.append(self._load(self._start.others[number], taken))
                taken += self._others[-1].plan.need.min_bytes
        except DoesNotFit:
            for model in self._others:
                model.free()
            self._others = []
            return "The models do not fit into memory together: they are loaded in turn, which takes longer."
        return ""

    def _together(self, base: Model, pairs: list[tuple[int, Model]], number: int, window: Window) -> None:
        parts: dict[int, list[tuple[Scores, Tops]]] = {i: [] for i, _ in pairs}
        for model in (base, *(model for _, model in pairs)):
            _begin(model, window)
        for start, end in window.blocks(self._rows):
            base_rows = _evaluate(base, window, start, end)
            for i, model in pairs:
                rows = _evaluate(model, window, start, end)
                parts[i].append(self._comparer.compare(base_rows, rows, window.tokens[start + 1 : end + 1]))
        for i, scored in parts.items():
            self._report(base.vocab, i, number, window, scored)

    def _in_turn(self, other: int, windows: list[Window], numbers: list[int]) -> None:
        n_vocab, path = self._comparer.n_vocab, self._start.others[other]
        need = read_model(Path(path)).size  # of the other model beside the base, about
        each = 4 * n_vocab * (self._start.n_ctx - 1 - self._start.n_ctx // 2)
        while numbers:
            model = self._base or self._load(self._start.base)
            self._base = None
            fit = max(int(_SPARE * (available_for_model() - need)) // each, 1)
            group, numbers = numbers[:fit], numbers[fit:]
            kept = [self._copied(model, windows[number]) for number in group]
            model.free()
            model = self._load(path)
            for number, rows in zip(group, kept, strict=True):
                window, parts = windows[number], []
                _begin(model, window)
                for start, end in window.blocks(self._rows):
                    base_rows = rows[start - window.first : end - window.first]
                    tokens = window.tokens[start + 1 : end + 1]
                    parts.append(self._comparer.compare(base_rows, _evaluate(model, window, start, end), tokens))
                self._report(model.vocab, other, number, window, parts)
            model.free()

    def _copied(self, model: Model, window: Window) -> np.ndarray:
        rows = np.empty((len(window.tokens) - 1 - window.first, self._comparer.n_vocab), np.float32)
        _begin(model, window)
        for start, end in window.blocks(self._rows):
            for i, row in enumerate(_evaluate(model, window, start, end), start - window.first):
                rows[i] = row
        return rows

    def _report(self, vocab: Vocab, other: int, number: int, window: Window, parts: list[tuple[Scores, Tops]]) -> None:
        scores = Scores.joined([scores for scores, _ in parts])
        tops = Tops.joined([tops for _, tops in parts])
        worst = tuple(_worst(vocab, window, scores, tops))
        self._output.send(Scored(other=other, window=number, worst=worst, **scores.packed()))


def _begin(model: Model, window: Window) -> None:
    """Evaluate the part of the window that is not scored."""
    model.sequence.clear()
    model.sequence.extend(window.tokens[: window.first])


def _evaluate(model: Model, window: Window, start: int, end: int) -> list[np.ndarray]:
    model.sequence.extend(window.tokens[start:end], n_outputs=end - start)
    return [model.sequence.logits(i) for i in range(end - start)]


def _windows(vocab: Vocab, texts: Sequence[Text], n_ctx: int, template: str) -> list[Window]:
    """Cut the texts into windows of `n_ctx` tokens, the kinds in turn, so that an early estimate covers all.

    Raises:
        UsageError: no text has that many tokens.
        TemplateError, GenerationFailed: the texts cannot be rendered or tokenized.
    """
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


def _worst(vocab: Vocab, window: Window, scores: Scores, tops: Tops) -> Iterator[Disagreement]:
    differing = np.flatnonzero(scores.same_top == 0)
    for i in differing[np.argsort(-scores.kld[differing], kind="stable")][:_WORST]:
        at = window.first + int(i)
        yield Disagreement(
            kld=float(scores.kld[i]),
            context=_text(vocab, window.tokens[max(at + 1 - _CONTEXT_TOKENS, 0) : at + 1]),
            token=_text(vocab, [window.tokens[at + 1]]),
            base_top=_text(vocab, [int(tops.base[i])]),
            base_p=float(tops.base_p[i]),
            other_top=_text(vocab, [int(tops.other[i])]),
            other_p=float(tops.other_p[i]),
        )


def _text(vocab: Vocab, tokens: list[int]) -> str:
    return b"".join(map(vocab.raw_piece, tokens)).decode("utf-8", "replace")


def _end_with(stream: BinaryIO) -> None:
    """End the process when its input ends: llama.cpp's calls cannot be waited for."""
    stream.read()
    os._exit(0)


def main() -> None:
    output = LineOutput.claim()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=prepared(QualityStart))
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    try:
        with contextlib.closing(Lockstep(start, output)) as lockstep:
            lockstep.run()
    except CpuchatError as error:
        output.refuse(error)


if __name__ == "__main__":
    main()
