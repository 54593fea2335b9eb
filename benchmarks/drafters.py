"""Time per proposal of the drafters that need no model, over a history of 32 thousand tokens.

    python benchmarks/drafters.py [--quick] [--rounds N]

The text is decoded as it would be: a proposal is compared with the text itself, what is right and one token more are
appended, and the next proposal is made. Warm, and with the caches emptied before each call, as decoding leaves them.
The texts: this project's source code, prose (Python's own manual), one file edited again and again (copies with small
changes), and the extremes.
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say, table

from cpuchat.base.text import common_prefix
from cpuchat.speculation.drafters.cascade import Cascade
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Drafter
from cpuchat.speculation.drafters.ngrams import NgramIndex, PromptLookup
from cpuchat.speculation.drafters.suffix import SuffixDecoding

N_HISTORY = 32_000
N_WRITTEN = 1_000
N_VOCAB = 150_000
JUNK = 64 << 20
"""Bytes that empty the caches when they are read."""
LIMIT_US = 60
PROJECT = Path(__file__).parent.parent
MAKERS: dict[str, Callable[[NgramIndex], Drafter]] = {"suffix": SuffixDecoding, "lookup": PromptLookup}


@dataclass(frozen=True)
class Times:
    """One run. Microseconds, one value per proposal; `append_us` per token; `tokens` per pass if all were verified."""

    propose_us: list[float]
    append_us: float
    tokens: float

    def __str__(self) -> str:
        return f"{statistics.median(self.propose_us):.1f} µs"


def tokenized(texts: Iterable[str], n: int) -> list[int]:
    """About as a vocabulary of subwords would cut the texts: words with their blank, long ones in pieces."""
    ids: dict[str, int] = {}
    tokens: list[int] = []
    for text in texts:
        for word in re.findall(r" ?\w+|\s+|[^\w\s]", text):
            tokens += [ids.setdefault(word[i : i + 6], len(ids)) for i in range(0, len(word), 6)]
        if len(tokens) >= n:
            break
    if len(tokens) < n:
        raise MeasureError(f"{len(tokens)} tokens of text, {n} are needed")
    return tokens[:n]


def source_code(folder: str) -> Iterator[str]:
    return (file.read_text(encoding="utf-8") for file in sorted((PROJECT / "cpuchat").glob(folder)))


def edited(n: int) -> list[int]:
    """A file of 4,000 tokens, and again and again a copy of the last one with every fortieth place changed."""
    rng = random.Random(1)
    version = tokenized(source_code("engine/**/*.py"), 4000)
    text = list(version)
    while len(text) < n:
        version = list(version)
        for _ in range(len(version) // 40):
            at = rng.randrange(len(version))
            version[at : at + rng.randrange(4)] = [rng.randrange(N_VOCAB) for _ in range(rng.randrange(4))]
        text += version
    return text[:n]


def zipf(n: int) -> list[int]:
    """Random words by Zipf's law; after two words seen together, every other time one that followed them before."""
    rng = random.Random(2)
    weights = list(itertools.accumulate(1 / (i + 1) for i in range(N_VOCAB)))
    followers: dict[tuple[int, int], list[int]] = {}
    text = [0, 1]
    while len(text) < n:
        known = followers.setdefault((text[-2], text[-1]), [])
        if known and rng.random() < 0.5:
            text.append(rng.choice(known))
        else:
            text.append(rng.choices(range(N_VOCAB), cum_weights=weights)[0])
            known.append(text[-1])
    return text


def texts(n: int) -> dict[str, list[int]]:
    rng = random.Random(3)
    period = [rng.randrange(N_VOCAB) for _ in range(57)]
    return {
        "source code": tokenized(source_code("**/*.py"), n),
        "prose": tokenized(topics.values(), n),
        "edited file": edited(n),
        "Zipf n-grams": zipf(n),
        "all equal": [7] * n,
        "period of 57": (period * (n // 57 + 1))[:n],
        "two tokens at random": [rng.randrange(2) for _ in range(n)],
        "random": [rng.randrange(N_VOCAB) for _ in range(n)],
    }


def run(make: Callable[[NgramIndex], Drafter], text: list[int], written: int, *, cold: bool) -> Times:
    """Decode the last `written` tokens of `text` along the drafter's proposals."""
    index = NgramIndex()
    drafter = make(index)
    start = len(text) - written
    index.extend(text[:start])
    junk = np.ones(JUNK, np.uint8)
    at, appended, proposals = start, 0.0, []
    while at < len(text):
        if cold:
            junk.sum()
        began = time.perf_counter_ns()
        tokens = drafter.propose(MAX_DEPTH).tokens
        proposed = time.perf_counter_ns()
        right = common_prefix(tokens, text[at : at + len(tokens)])
        new = text[at : at + right + 1]
        if cold:
            junk.sum()
        resumed = time.perf_counter_ns()
        index.extend(new)
        appended += time.perf_counter_ns() - resumed
        proposals.append((proposed - began) / 1e3)
        at += len(new)
    return Times(proposals, appended / 1e3 / written, written / len(proposals))


def cascade_us(text: list[int], written: int) -> float:
    """µs per token of both drafters with their shadow scoring, when nothing is ever worth verifying."""
    index = NgramIndex()
    cascade = Cascade(index, [make(index) for make in MAKERS.values()], lambda proposal: 0)
    start = len(text) - written
    cascade.begin_answer(text[:start])
    times = []
    for token in text[start:]:
        began = time.perf_counter_ns()
        cascade.propose(MAX_DEPTH)
        cascade.append([token])
        cascade.take_scores()
        times.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(times)


def footprint(text: list[int]) -> tuple[float, float]:
    """MB that the index of `text` takes, which the drafters share, and seconds to make it."""
    began = time.perf_counter()
    NgramIndex().extend(text)
    seconds = time.perf_counter() - began
    tracemalloc.start()
    index = NgramIndex()
    index.extend(text)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / 1e6, seconds


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def main() -> None:
    options = arguments(__doc__)
    where = machine()
    rounds = options.rounds or (1 if options.quick else 3)
    written = 100 if options.quick else N_WRITTEN
    kinds = texts(N_HISTORY + written)
    rows: list[Row] = []
    details: list[list[str]] = []
    for kind, text in kinds.items():
        say(kind)
        sides = {
            (name, cold): (lambda m=make, t=text, c=cold: run(m, t, written // (5 if c else 1), cold=c))
            for name, make in MAKERS.items()
            for cold in (False, True)
        }
        named = {f"{name} {'cold' if cold else 'warm'}": side for (name, cold), side in sides.items()}
        results = dict(zip(sides, alternate(rounds, named, settle=0.0).values(), strict=True))
        for (name, cold), runs in results.items():
            what = f"{name}, {kind}, caches {'cold' if cold else 'warm'}"
            target = Target(LIMIT_US, at_least=False)
            rows.append(Row(what, "µs", [statistics.median(r.propose_us) for r in runs], target=target))
            worst = statistics.median(p99(r.propose_us) for r in runs)
            append = statistics.median(r.append_us for r in runs)
            details.append([what, f"{worst:.1f}", f"{append:.2f}", f"{runs[0].tokens:.2f}"])
        shadow = [cascade_us(text, written) for _ in range(rounds)]
        rows.append(Row(f"cascade, {kind}, nothing verified, per token", "µs", shadow))
    remarks = [
        f"the index, {kind}: {used:.1f} MB for {len(text):,} tokens, made in {1e3 * seconds:.0f} ms"
        for kind, text in kinds.items()
        for used, seconds in [footprint(text)]
        if kind in ("source code", "random")
    ]
    heads = ("what", "99th percentile, µs", "append, µs per token", "tokens per pass if all is verified")
    print("\n" + table(details, heads))
    report("drafters", where, rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
