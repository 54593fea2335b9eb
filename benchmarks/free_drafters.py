"""Lookup and suffix decoding: on text that repeats its prompt, and where nothing can be predicted."""

from __future__ import annotations

import statistics

from common import Row, Target
from drafting import (
    ADAPTIVE,
    Runs,
    Section,
    Setup,
    Side,
    Table,
    adaptive,
    compare,
    figures,
    tokens_per_pass,
    workers,
)
from pairs import Text, as_text, copied_text, decoy_text, text_at
from product import answer

from cpuchat.protocol import Sampling

QUANTIZATION = "Q8_0"
COPIED, SOURCE = 129, 400
CHANGED = 0.05
PROSE = 65
FASTER, NEVER_SLOWER = Target(2.0), Target(0.98)
HEADS = ("text", "drafters", "against plain", "tokens per pass", "accepted of drafted", "off at the end because")
DRAWN = Sampling(temperature=1.0, top_k=40, top_p=1.0, min_p=0.0)
"""At random from 40 nearly equal tokens each time; all sides of a round draw with the same seed."""
FREE = {
    "lookup": adaptive("lookup"),
    "suffix": adaptive("suffix"),
    "lookup + suffix": adaptive("lookup", "suffix"),
}


def _lines(table: Table, what: str, runs: Runs) -> None:
    for side, answers in runs.answers.items():
        if side == "plain":
            continue
        found = [figures(done) for done in answers]
        drafted = sum(one.draft_n for one in found)
        accepted = sum(one.draft_n_accepted for one in found)
        share = f"{accepted} of {drafted}"
        ratio, per_pass = f"{runs.ratio(side):.2f}×", f"{tokens_per_pass(answers):.2f}"
        table.lines.append([what, side, ratio, per_pass, share, found[-1].reason or "(on)"])


def _rows(what: str, runs: Runs, target: Target | None) -> list[Row]:
    return [
        Row(f"{what}: {side}", "tok/s", runs.rates(side), runs.rates("plain"), target)
        for side in runs.answers
        if side != "plain"
    ]


def _wrong(what: str, runs: Runs) -> str:
    return f"{what}: {runs.wrong()} of {runs.count()} answers are not the known text"


def copy(setup: Setup) -> Section:
    """A target whose prompt holds its own future, word for word, and with 5 % of the words changed."""
    target = setup.shapes.target_file(QUANTIZATION)
    n, source = (65, 120) if setup.quick else (COPIED, SOURCE)
    rounds = setup.choose(3)
    section = Section(tables=[Table("copying", HEADS)])
    with workers(setup.threads) as loaded:
        backend = loaded.load(target)
        loaded.run(answer(backend, as_text(range(500, 516)), 8))
        sides = {"plain": Side(backend)} | {name: Side(backend, wanted) for name, wanted in FREE.items()}
        for what, changed, goal in (("copying", 0.0, FASTER), (f"copying, {CHANGED:.0%} changed", CHANGED, None)):
            texts = [copied_text(setup.shapes.n_vocab, salt, n, source, changed) for salt in range(rounds)]
            runs = compare(loaded, sides, texts, n)
            _add(section, what, runs, goal)
    return section


def prose(setup: Setup) -> Section:
    """Text that no drafter can predict: it must not cost more than 2 %."""
    n = 33 if setup.quick else PROSE
    rounds = setup.choose(5)
    shapes = setup.shapes
    section = Section(tables=[Table("where nothing can be predicted", HEADS)])
    with workers(setup.threads) as loaded:
        noise = loaded.load(shapes.noise_file(QUANTIZATION), shapes.draft_file(1.0))
        loaded.run(answer(noise, as_text(range(500, 516)), 8))
        wanted = {"draft": ADAPTIVE, "lookup + suffix": FREE["lookup + suffix"]}
        wanted["all three"] = adaptive("draft", "lookup", "suffix")
        sides = {"plain": Side(noise, sampling=DRAWN)}
        sides |= {name: Side(noise, one, DRAWN) for name, one in wanted.items()}
        texts = [Text(text_at(shapes.n_vocab, 1.0, 997 * salt, 0).prompt, ()) for salt in range(rounds)]
        _add(section, "noise, sampled", compare(loaded, sides, texts, n), NEVER_SLOWER)
    with workers(setup.threads) as loaded:
        backend = loaded.load(shapes.target_file(QUANTIZATION))
        loaded.run(answer(backend, as_text(range(500, 516)), 8))
        sides = {"plain": Side(backend)} | {name: Side(backend, one) for name, one in FREE.items()}
        texts = [decoy_text(shapes.n_vocab, salt, n) for salt in range(rounds)]
        _add(section, "a prompt full of decoys", compare(loaded, sides, texts, n), NEVER_SLOWER)
    section.remarks.append(
        "noise is compared with plain decoding of the same seed; its logits are nearly equal, so that rounding alone "
        "can choose another token, after which everything differs"
    )
    return section


def _add(section: Section, what: str, runs: Runs, goal: Target | None) -> None:
    section.rows += _rows(what, runs, goal)
    _lines(section.tables[0], what, runs)
    section.remarks.append(_wrong(what, runs))
    section.data[what] = {side: {"rates": runs.rates(side)} for side in runs.answers} | {
        "prompt_n": statistics.median(len(text.prompt) for text in runs.texts)
    }
