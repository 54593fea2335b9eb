"""The written corpus: topics with questions and answers, read from TOML."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CORPUS = FOLDER / "corpus"


@dataclass(frozen=True)
class Topic:
    """One thing the model knows.

    `key` is "file:id" (ids repeat between files), `answers` say the same in different words, the first is the
    preferred one, and `more` answers a follow-up such as "tell me more".
    """

    key: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    more: str

    @property
    def name(self) -> str:
        """The id without its file."""
        return self.key.partition(":")[2]


def load_topics(folder: Path = CORPUS) -> list[Topic]:
    """All topics of all files in `folder`, in a fixed order."""
    topics = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["topic"]:
            topics.append(
                Topic(
                    key=f"{path.stem}:{entry['id']}",
                    questions=tuple(q.strip() for q in entry["questions"]),
                    answers=tuple(a.strip() for a in entry["answers"]),
                    more=entry.get("more", "").strip(),
                )
            )
    if len({topic.key for topic in topics}) != len(topics):
        raise ValueError("two topics of one file share an id")
    return topics


def answer_texts(topics: list[Topic]) -> list[str]:
    """Everything that the model may say about `topics`: every answer and every `more`."""
    return [text for topic in topics for text in (*topic.answers, topic.more) if text]
