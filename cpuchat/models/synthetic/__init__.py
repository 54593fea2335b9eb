"""Models made of random weights in any real shape, for speed work and tests; and pairs with known acceptance."""

from __future__ import annotations

from cpuchat.models.synthetic.pair import draft_token_table, next_token_table, write_pair
from cpuchat.models.synthetic.shapes import SHAPES, Shape
from cpuchat.models.synthetic.vocab import CHATML, FIRST_WORD, Vocab, word
from cpuchat.models.synthetic.write import write_model

__all__ = [
    "CHATML",
    "FIRST_WORD",
    "SHAPES",
    "Shape",
    "Vocab",
    "draft_token_table",
    "next_token_table",
    "word",
    "write_model",
    "write_pair",
]
