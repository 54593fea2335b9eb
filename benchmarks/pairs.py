"""Targets and drafts with a known acceptance rate, and texts that a target is known to write.

What a synthetic target says next is a fixed function of the last token (`next_token_table`), and so is what its draft
says (`draft_token_table`). So the whole answer to a prompt is known beforehand, and which of its tokens the draft says
too: acceptance, tokens per pass and the number of verify passes at any fixed depth can be computed exactly, and a
wrong token is noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from common import MeasureError, say
from models import FOLDER

from cpuchat.models.synthetic.model import FIRST_WORD, write_model
from tests.support.pair_files import draft_token_table, next_token_table, write_pair
from tests.support.shapes import shape_of, word

N_VOCAB = 32768
DRAFT_QUANTIZATION = "Q8_0"
PROMPT = 32
"""Tokens of a prompt from which a target goes on."""


@dataclass(frozen=True)
class Shapes:
    """The sizes of a pair, by their names in `synthetic.SHAPES`; `layers` None: as many as the shape has."""

    target: str = "1.5b"
    draft: str = "0.05b"
    n_vocab: int = N_VOCAB
    layers: int | None = None
    draft_layers: int | None = None

    def target_file(self, quantization: str) -> Path:
        """The target in this quantization; written the first time."""
        name = f"pair-{self.target}{_layers(self.layers)}-{self.n_vocab}-{quantization}.gguf"
        return written(name, lambda file: self._write(file, None, 1.0, quantization))

    def draft_file(self, alpha: float) -> Path:
        """A draft that is right about the share `alpha` of the words, whatever the target's size; in Q8_0."""
        name = f"draft-{self.draft}{_layers(self.draft_layers)}-{self.n_vocab}-a{round(100 * alpha):03}.gguf"

        def write(file: Path) -> None:
            # A pair is always written whole; the target's size does not show in the draft, so the smallest will do.
            beside = file.with_suffix(".beside")
            small = Shapes("tiny", self.draft, self.n_vocab, 1, self.draft_layers)
            try:
                small._write(beside, file, alpha, DRAFT_QUANTIZATION)
            finally:
                beside.unlink(missing_ok=True)

        return written(name, write)

    def noise_file(self, quantization: str) -> Path:
        """Random weights in the target's shape and with its vocabulary: text that nothing can predict."""
        name = f"noise-{self.target}{_layers(self.layers)}-{self.n_vocab}-{quantization}.gguf"
        shape = msgspec.structs.replace(shape_of(self.target, self.layers), n_vocab=self.n_vocab)
        return written(name, lambda file: write_model(file, shape, quantization))

    def _write(self, target: Path, draft: Path | None, alpha: float, quantization: str) -> None:
        write_pair(
            target,
            draft,
            alpha,
            target=self.target,
            draft=self.draft,
            quant=quantization,
            draft_quant=DRAFT_QUANTIZATION,
            layers=self.layers,
            draft_layers=self.draft_layers,
            n_vocab=self.n_vocab,
        )


def _layers(count: int | None) -> str:
    return "" if count is None else f"-{count}l"


def written(name: str, write: Callable[[Path], object]) -> Path:
    """The file of that name in work/models; written the first time."""
    file = FOLDER / name
    if not file.is_file():
        say(f"writing {name}")
        write(file)
    return file


@dataclass(frozen=True)
class Text:
    """A prompt, what the target writes after it, and which tokens of that the draft says too (None: no draft)."""

    prompt: tuple[int, ...]
    future: tuple[int, ...]
    right: tuple[bool, ...] | None = None

    @property
    def prompt_text(self) -> str:
        return as_text(self.prompt)

    @property
    def future_text(self) -> str:
        return as_text(self.future)

    @property
    def right_after_first(self) -> tuple[bool, ...]:
        """The first token comes out of reading the prompt and is never drafted."""
        if self.right is None:
            raise MeasureError("this text has no draft")
        return self.right[1:]


def as_text(tokens: Sequence[int]) -> str:
    return "".join(word(token - FIRST_WORD) for token in tokens)


@functools.cache
def walk(n_vocab: int) -> np.ndarray:
    """All words in the order in which a target says them, beginning at a random one; it ends before the first."""
    table = next_token_table(n_vocab)
    order = np.empty(n_vocab - FIRST_WORD, np.int64)
    token = FIRST_WORD
    for index in range(len(order)):
        order[index] = token
        token = table[token]
    return order


@functools.cache
def _agreement(n_vocab: int, alpha: float) -> np.ndarray:
    """For each word of `walk`, whether the draft says what the target says after it."""
    order = walk(n_vocab)
    return next_token_table(n_vocab)[order] == draft_token_table(n_vocab, alpha)[order]


def text_at(n_vocab: int, alpha: float, start: int, n_tokens: int, n_prompt: int = PROMPT) -> Text:
    """The prompt begins `start` words into the cycle, the answer has `n_tokens`."""
    place = (start + np.arange(n_prompt + n_tokens)) % (n_vocab - FIRST_WORD)
    tokens = walk(n_vocab)[place]
    right = _agreement(n_vocab, alpha)[place]
    future = slice(n_prompt, None)
    said = right[n_prompt - 1 : -1]  # about a token, after the one before it
    return Text(tuple(tokens[:n_prompt].tolist()), tuple(tokens[future].tolist()), tuple(said.tolist()))


def typical_texts(n_vocab: int, alpha: float, n_tokens: int, count: int, depths: Sequence[int]) -> list[Text]:
    """Texts of which the formula for tokens per pass is as true as possible at all `depths`.

    A text of 100 tokens holds ten that a draft with alpha 0.9 gets wrong, or five, or fifteen. So that a short answer
    can stand for a long one, the cycle is cut into texts and the `count` most typical of them are taken. All sides
    write the same text.
    """
    starts = range(0, n_vocab - FIRST_WORD - PROMPT - n_tokens, PROMPT + n_tokens)
    texts = [text_at(n_vocab, alpha, start, n_tokens) for start in starts]

    def oddness(text: Text) -> float:
        return max(abs(known(text, depth).tokens_per_pass / expected_tokens(alpha, depth) - 1) for depth in depths)

    return sorted(texts, key=oddness)[:count]


def expected_tokens(alpha: float, depth: int) -> float:
    """Tokens per verify pass when each of `depth` drafted tokens is right with rate `alpha` (Leviathan et al. 2023,
    equation 1): (1 - alpha^(depth + 1)) / (1 - alpha)."""
    return sum(alpha**i for i in range(depth + 1))


@dataclass(frozen=True)
class Known:
    """What a fixed depth must come to for one text: passes of the target over the tokens after the first, drafted
    tokens that are held against the target (none after a wrong one) and those accepted."""

    passes: int
    compared: int
    accepted: int

    @property
    def acceptance(self) -> float:
        return self.accepted / self.compared

    @property
    def tokens_per_pass(self) -> float:
        return (self.accepted + self.passes) / self.passes


def known(text: Text, depth: int) -> Known:
    """Counted token by token; exactly `depth` tokens are drafted each time, fewer only at the end of the answer."""
    right = text.right_after_first
    written = passes = compared = accepted = 0
    while written < len(right):
        drafted = min(depth, len(right) - written - 1)
        run = 0
        while run < drafted and right[written + run]:
            run += 1
        passes, accepted, compared = passes + 1, accepted + run, compared + min(run + 1, drafted)
        written += run + 1
    return Known(passes, compared, accepted)
