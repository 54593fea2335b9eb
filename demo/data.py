"""From topics to batches: sampled conversations, their tokens and loss weights, packed into rows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo import arithmetic
from demo.augment import augment
from demo.corpus import Topic
from demo.phrases import FOLLOW_UPS, NO_MORE, NOTHING_YET, SYSTEM_PROMPTS
from demo.phrasing import Parts, variants
from demo.tokenizer import END_OF_TEXT, IM_END, IM_START

COMPOSED_SHARE, MANY = 0.5, 100
SUM_SHARE = 0.3
SHORT_SHARE, SHORT_LOSS = 0.65, 12
"""This share of the single questions keeps only so many tokens of the answer: enough to learn which answer it is."""


@dataclass
class Document:
    """Token ids and, for each, whether predicting it counts (1) or not (0)."""

    ids: list[int]
    loss: list[int]


@dataclass
class Batch:
    """A piece of a training step.

    `rows` (batch, time) ids; `mask` (batch, 1, time, time) bool; `index` (n,) flat positions whose next token counts;
    `target` (n,) those next tokens; `keep` (batch, time) 0 where an embedding is blanked.
    """

    rows: Tensor
    mask: Tensor
    index: Tensor
    target: Tensor
    keep: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in ("rows", "mask", "index", "target", "keep")))


class Sampler:
    """Draws documents and batches; the same seed gives the same ones."""

    def __init__(self, topics: list[Topic], parts: dict[str, Parts], tokenizer: Tokenizer, seed: int) -> None:
        self.topics = topics
        self.rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}
        self._header = len(tokenizer.encode("assistant\n").ids)
        # Between "each topic alike" and "each question alike".
        self._weights = [len(topic.questions) ** 0.6 for topic in topics]
        # Topics with many composed questions come more often, up to twice.
        self._parts = parts
        for i, topic in enumerate(topics):
            many = sum(1 for part in parts[topic.key].all() for _ in variants(part)) if topic.key in parts else 0
            self._weights[i] *= 1 + min(many, MANY) / MANY

    def encode(self, text: str) -> list[int]:
        """Ids of `text` without special tokens; kept, because answers come again and again."""
        if text not in self._cache:
            if len(self._cache) > 50_000:
                self._cache.clear()
            self._cache[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._cache[text]

    def answer(self, text: str) -> list[int]:
        """Ids of `text` as they stand in an answer, its end included."""
        return [*self.encode(f"assistant\n{text}")[self._header :], IM_END]

    def prompt(self, messages: list[tuple[str, str]]) -> list[int]:
        """Ids of (role, text) `messages` with the opening of the answer, as the chat template renders them."""
        return [*self.chat(messages).ids, IM_START, *self.encode("assistant\n")]

    def chat(self, messages: list[tuple[str, str]]) -> Document:
        """A whole conversation; the loss counts on answers and on the token that ends them."""
        ids: list[int] = []
        loss: list[int] = []
        for role, text in messages:
            body = self.encode(f"{role}\n{text}")
            says = role == "assistant"
            ids += [IM_START, *body, IM_END, *self.encode("\n")]
            loss += [0] * (1 + self._header) + [int(says)] * (len(body) - self._header + 1) + [0]
        return Document(ids, loss)

    def document(self, turns: int | None = None) -> Document:
        """One random document: mostly conversations, a few plain texts."""
        rng = self.rng
        if turns is None:
            if rng.random() < 0.04:
                return self._plain_text()
            turns = rng.choices((1, 2, 3, 4, 5), (0.7, 0.14, 0.07, 0.05, 0.04))[0]
        messages: list[tuple[str, str]] = []
        if rng.random() < 0.25:
            messages.append(("system", rng.choice(SYSTEM_PROMPTS)))
        more: str | None = None
        for turn in range(turns):
            ask, say, more = self._turn(more, first=turn == 0)
            messages += [("user", ask), ("assistant", say)]
        document = self.chat(messages)
        if turns == 1 and rng.random() < SHORT_SHARE:
            first = document.loss.index(1)
            document = Document(document.ids[: first + SHORT_LOSS], document.loss[: first + SHORT_LOSS])
        return document

    def _turn(self, more: str | None, first: bool) -> tuple[str, str, str | None]:
        """(question, answer, what to say if the user then wants more; None if nothing was said yet)."""
        rng = self.rng
        if (more is not None and rng.random() < 0.35) or (first and rng.random() < 0.01):
            ask = augment(rng.choice(FOLLOW_UPS), rng, 0.4)
            if first or more is None:
                return ask, NOTHING_YET, None
            return ask, more or NO_MORE, ""
        if rng.random() < SUM_SHARE:
            ask, say, reason = arithmetic.sample(rng)
            return self._vary(ask, 0.3), say, reason
        topic = rng.choices(self.topics, self._weights)[0]
        say = topic.answers[0] if rng.random() < 0.75 else rng.choice(topic.answers)
        if topic.key in self._parts and rng.random() < COMPOSED_SHARE:
            return self._vary(self._parts[topic.key].compose(rng), 0.6), say, topic.more
        return self._vary(rng.choice(topic.questions), 1.0), say, topic.more

    def _vary(self, question: str, strength: float) -> str:
        return question if self.rng.random() < 0.2 else augment(question, self.rng, strength)

    def _plain_text(self) -> Document:
        topic = self.rng.choices(self.topics, self._weights)[0]
        text = f"{self.rng.choice(topic.answers)} {topic.more}".strip()
        ids = [*self.encode(text), END_OF_TEXT]
        return Document(ids, [0] + [1] * (len(ids) - 1))

    def batch(self, rows: int, time: int, long_share: float) -> Batch:
        """`rows` rows of `time` tokens: a `long_share` of them one long chat, the others documents side by side that
        don't see each other."""
        packed = [self._row(time, self.rng.random() < long_share) for _ in range(rows)]
        ids = torch.tensor([row[0] for row in packed])
        loss = torch.tensor([row[1] for row in packed])
        owner = torch.tensor([row[2] for row in packed])
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        causal = torch.ones(time, time, dtype=torch.bool).tril()
        mask = ((owner[:, :, None] == owner[:, None, :]) & causal)[:, None]
        counts = (loss[:, 1:] == 1) & (owner[:, 1:] == owner[:, :-1])
        counts = torch.cat([counts, torch.zeros(rows, 1, dtype=torch.bool)], dim=1)
        index = counts.flatten().nonzero()[:, 0]
        # Blank some words of the questions in half of the documents, never an answer or a special token.
        blank = torch.rand(rows, time, generator=generator) < 0.1
        shaky = torch.rand(rows, int(owner.max()) + 1, generator=generator).gather(1, owner) < 0.5
        keep = ~(blank & shaky & (loss == 0) & (ids > IM_END))
        return Batch(ids, mask, index, ids.flatten()[index + 1], keep.float())

    def _row(self, time: int, long: bool) -> tuple[list[int], list[int], list[int]]:
        """(ids, loss, number of the document of each token), each `time` long."""
        ids: list[int] = []
        loss: list[int] = []
        owner: list[int] = []
        number = 0
        while len(ids) < time:
            document = self.document(turns=time // 40) if long else self.document()
            ids += document.ids
            loss += document.loss
            owner += [number] * len(document.ids)
            number += 1
        return ids[:time], loss[:time], owner[:time]
