"""Other ways to ask the same question: the variety that a written corpus cannot hold.

Every step keeps what is asked. Held-back questions are never an input here.
"""

from __future__ import annotations

import random
import re

# fmt: off
# Phrases that may stand for each other without changing which answer is right.
SYNONYMS: tuple[tuple[str, ...], ...] = (
    ("how do i", "how can i", "how would i", "how should i", "how could i", "how to", "how does one",
     "what is the way to", "is there a way to", "show me how to", "tell me how to", "explain how to",
     "i want to know how to", "what do i do to", "can i", "could i", "i would like to", "i want to", "i need to",
     "is it possible to", "what must i do to", "i'd like to"),
    ("what is", "what's", "whats", "what exactly is", "explain", "tell me about", "describe", "can you explain",
     "could you explain", "what do you mean by", "what does one call", "i want to understand", "define",
     "give me an explanation of", "in plain words, what is"),
    ("why is", "how come", "for what reason is", "what is the reason that", "can you explain why", "why on earth is"),
    ("why does", "why would", "how come", "what makes", "what is the reason that", "can you tell me why"),
    ("why do", "how come", "what is the reason that", "explain why", "tell me why"),
    ("which key", "what key", "which button", "what button", "which shortcut", "what shortcut", "which keys"),
    ("where can i", "where do i", "where should i", "how do i", "in which place can i"),
    ("where is", "where's", "where can i find", "where do i find", "in which place is", "how do i find"),
    ("does it", "will it", "would it", "can it", "does cpuchat", "does this app", "will this program"),
    ("does cpuchat", "does this app", "does the app", "does this program", "does this tool", "will cpuchat"),
    ("in cpuchat", "in this app", "here", "in this program", "in the app", ""),
    ("should i", "do i have to", "must i", "ought i to", "is it good to", "is it better to", "would you"),
    ("what happens if", "what happens when", "what if", "what would happen if"),
    ("do i need", "must i have", "do i have to have", "is it necessary to have", "is there a need for"),
    ("answer", "reply", "response", "output"),
    ("answers", "replies", "responses"),
    ("chat", "conversation", "talk", "session"),
    ("chats", "conversations", "talks", "sessions"),
    ("computer", "machine", "laptop", "pc", "system", "box"),
    ("fast", "quick", "speedy"),
    ("faster", "quicker", "speedier"),
    ("slow", "sluggish"),
    ("speed up", "make faster", "accelerate"),
    ("big", "large", "huge"),
    ("bigger", "larger"),
    ("small", "little", "tiny"),
    ("use", "make use of", "work with"),
    ("show", "display", "see"),
    ("change", "alter", "switch", "modify"),
    ("choose", "pick", "select"),
    ("stored", "kept", "saved"),
    ("start", "begin", "open"),
    ("needs", "requires", "takes"),
    ("many", "lots of", "a lot of"),
    ("text", "words", "writing"),
    ("cpu", "processor"),
    ("tokens per second", "tok/s", "tokens/s"),
    ("mean", "stand for", "signify"),
    ("important", "relevant", "crucial"),
    ("better", "preferable"),
    ("all", "every one of"),
    ("writes", "produces", "generates"),
    ("write", "produce", "generate"),
    ("folder", "directory"),
    ("question", "message", "prompt"),
    ("limited by", "bound by", "restricted by"),
    ("ram", "memory", "main memory"),
    ("explain", "describe", "clarify", "tell me"),
    ("what does", "what would", "tell me what does"),
    ("how much", "what amount of"),
    ("when", "at the moment when"),
)

PREFIXES = (
    "hi,", "hello,", "hey,", "ok,", "okay,", "so", "so,", "well,", "um,", "please,", "quick question:", "question:",
    "one question:", "another question:", "by the way,", "btw", "sorry,", "excuse me,", "tell me,", "say,",
    "just wondering,", "i was wondering,", "i wonder,", "could you tell me:", "can you tell me:", "please tell me:",
    "do you know:", "i am new here,", "i'm new to this.", "help!", "help me,", "i have a question:", "and", "but",
    "now", "actually,", "good morning,", "hi there,", "hello there.", "i don't get it,", "i am confused.",
    "my friend asks:", "for my notes:", "in short,", "briefly,", "in simple words,", "be honest,", "could you say",
)
SUFFIXES = (
    "please", "pls", "thanks", "thank you", "exactly", "really", "in short", "in simple words", "in one sentence",
    "for a beginner", "then", "now", "here", "anyway", "again", "for me", "i wonder", "any idea", "do you know",
    "can you help", "help", "i am curious", "in detail", "briefly", "today", "by the way", "or not", "right",
    "in this app", "on my machine", "on my computer", "at all", "if i may ask",
)
FILLERS = ("just", "really", "actually", "maybe", "somehow", "exactly", "like", "even", "quickly", "simply", "kind of")
DROPPABLE = frozenset((
    "the", "a", "an", "is", "are", "do", "does", "did", "i", "me", "my", "you", "it", "this", "that", "to", "of", "in",
    "on", "for", "with", "and", "or", "so", "can", "could", "would", "should", "will", "please", "be", "been", "am",
    "there", "here", "what", "how",
))
# fmt: on
_PATTERNS = [
    (
        re.compile(
            r"(?<![\w'])(?:"
            + "|".join(sorted(map(re.escape, filter(None, group)), key=len, reverse=True))
            + r")(?![\w'])",
            re.IGNORECASE,
        ),
        group,
    )
    for group in SYNONYMS
]  # fmt: skip
_NEIGHBOURS = {a: b for a, b in zip("qwertyuiopasdfghjklzxcvbnm", "wertyuiopqsdfghjklaxcvbnmz", strict=True)}


def augment(question: str, rng: random.Random, strength: float = 1.0) -> str:
    """A random variant of `question`; `strength` scales how often each change is made, 0 keeps it as it is."""
    text = question

    def hit(share: float) -> bool:
        return rng.random() < share * strength

    if hit(0.5):
        text = swap_synonyms(text, rng)
    if hit(0.2):
        text = drop_words(text, rng)
    if hit(0.06):
        text = keywords(text)
    if hit(0.06):
        text = _insert_filler(text, rng)
    stem = text.rstrip(" ?.!")
    mark = text[len(stem) :].strip()
    if hit(0.15):
        stem = f"{stem}{rng.choice((', ', ' '))}{rng.choice(SUFFIXES)}"
    if hit(0.25):
        stem = f"{rng.choice(PREFIXES)} {stem}"
    if hit(0.12):
        stem = typo(stem, rng)
    if hit(0.6):
        mark = rng.choice(("", "", "?", "?", ".", "!", "??"))
    text = _case(stem + mark, rng, hit)
    return text.strip() or question


def swap_synonyms(text: str, rng: random.Random) -> str:
    """Each known phrase is replaced by another of its group about every second time."""
    for pattern, group in _PATTERNS:
        if rng.random() < 0.5:
            text = pattern.sub(lambda _match, group=group: rng.choice(group), text, count=1)
    return re.sub(r"\s+", " ", text).strip()


def drop_words(text: str, rng: random.Random) -> str:
    """Leaves out some words, small ones far more often; at least two stay."""
    parts = text.split()
    kept = [w for w in parts if rng.random() > (0.35 if w.lower().strip(",.?!") in DROPPABLE else 0.07)]
    return " ".join(kept if len(kept) >= 2 else parts)


def keywords(text: str) -> str:
    """The question as someone types it into a search box."""
    kept = [w for w in text.split() if w.lower().strip(",.?!'") not in DROPPABLE]
    return " ".join(kept) if len(kept) >= 2 else text


def typo(text: str, rng: random.Random) -> str:
    """One or two slips of the fingers in words of four letters or more."""
    parts = text.split(" ")
    for _ in range(rng.choice((1, 1, 2))):
        long_words = [i for i, w in enumerate(parts) if len(w) >= 4 and w.isalpha()]
        if not long_words:
            break
        i = rng.choice(long_words)
        word = parts[i]
        at = rng.randrange(1, len(word) - 1)
        kind = rng.randrange(4)
        if kind == 0:
            word = word[:at] + word[at + 1 :]
        elif kind == 1:
            word = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        elif kind == 2:
            word = word[:at] + word[at] + word[at:]
        else:
            word = word[:at] + _NEIGHBOURS.get(word[at].lower(), word[at]) + word[at + 1 :]
        parts[i] = word
    return " ".join(parts)


def _insert_filler(text: str, rng: random.Random) -> str:
    parts = text.split()
    parts.insert(rng.randrange(1, len(parts) + 1), rng.choice(FILLERS))
    return " ".join(parts)


def _case(text: str, rng: random.Random, hit) -> str:
    if hit(0.5):
        return text.lower()
    if hit(0.4):
        return text[:1].upper() + text[1:]
    if hit(0.03):
        return text.upper()
    return text
