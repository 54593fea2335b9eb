"""Real text: what suffix decoding gains where a base model writes by itself, and what a real pair of models gains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from base_model import base_model
from coder_pair import coder_pair
from common import MeasureError, Row, Target, say
from drafting import (
    Runs,
    Section,
    Setup,
    Side,
    Table,
    adaptive,
    compare,
    figures,
    fixed,
    model_info,
    tokens_per_pass,
    workers,
)
from pairs import Text
from product import GREEDY, answer
from replay import RECORDED, Known, Task, likeness, oracle, proposed, recorded, repeated, replay, tasks, tokenizer

from cpuchat.present.drafts_off import off_words
from cpuchat.protocol.messages import Sampling
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.depth.costs import PassCosts

GAINS, PROSE_NOT_SLOWER, SHARE = Target(1.0), Target(0.99), Target(0.6)
HEADS = ("text", "drafters", "against plain", "tokens per pass", "accepted of drafted", "off at the end because")
SUFFIX = adaptive("suffix")

READ = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.0)
"""For free prose; greedy, a small model soon repeats itself, which is easily drafted."""
OWN_HEADS = (
    "task",
    "words of the right answer in it",
    "against plain",
    "oracle",
    "share of its gain",
    "tokens per pass",
    "accepted of drafted",
)
OURS = "suffix"
"""What the app drafts with when there is no draft model."""
RIGHT_HEADS = (
    "task",
    "T(n) of",
    OURS,
    "oracle",
    "share of its gain",
    "oracle over all repetitions",
    "share of its gain",
)


def _lines(table: Table, what: str, runs: Runs) -> None:
    for side, answers in runs.answers.items():
        if side == "plain":
            continue
        found = [figures(done) for done in answers]
        drafted = sum(one.draft_n for one in found)
        accepted = sum(one.draft_n_accepted for one in found)
        share = f"{accepted} of {drafted}"
        ratio, per_pass = f"{runs.ratio(side):.2f}×", f"{tokens_per_pass(answers):.2f}"
        table.lines.append([what, side, ratio, per_pass, share, off_words(found[-1].off) or "(on)"])


def _rows(what: str, runs: Runs, target: Target | None) -> list[Row]:
    return [
        Row(f"{what}: {side}", "tok/s", runs.rates(side), runs.rates("plain"), target)
        for side in runs.answers
        if side != "plain"
    ]


def _wrong(what: str, runs: Runs) -> str:
    return f"{what}: {runs.wrong()} of {runs.count()} answers are not the known text"


@dataclass(frozen=True)
class Prompted(Text):
    """A prompt in words."""

    words: str = ""

    @property
    def prompt_text(self) -> str:
        return self.words


def _share(ratio: float, best: float) -> str:
    """Share of the gain that the oracle would reach; where that is under 2 %, there is nothing to share."""
    return f"{(ratio - 1) / (best - 1):.2f}" if best > 1.02 else "–"


def text(setup: Setup) -> Section:
    """Real text: what a real base model writes by itself, measured; and the right answers, in simulated time.

    A base model of 270 million parameters does not always do the task. Its own text shows what the whole program gains;
    the right answers, what copying is worth where the model is good.
    """
    chosen = tasks()[: 2 if setup.quick else None]
    known = tokenizer(base_model())
    own = Table("the model's own text, measured", OWN_HEADS)
    right = Table("the right answers, replayed with the times of passes", RIGHT_HEADS)
    section = Section(tables=[own, right])
    with workers(setup.threads) as loaded:
        backend = loaded.load(base_model())
        info = model_info(backend)
        if not info.pass_ms:
            raise MeasureError(" ".join(info.notes) or "the model was not calibrated")
        costs = PassCosts(info.pass_ms)
        loaded.run(answer(backend, "Warm up: one, two, three,", 16, to_the_end=False))
        for task in chosen:
            say(task.name)
            sampling = GREEDY if task.copies else READ
            sides = {"plain": Side(backend, sampling=sampling)}
            sides[OURS] = Side(backend, SUFFIX, sampling)
            n = len(known(task.prompt, task.answer).answer)
            rounds = setup.choose(5)
            runs = compare(loaded, sides, [Prompted((), (), words=task.prompt)] * rounds, n, to_the_end=False)
            section.rows += _rows(task.name, runs, GAINS if task.copies else PROSE_NOT_SLOWER)
            section.remarks.append(_wrong(task.name, runs))
            own.lines.append(_own_line(task, runs, costs, known))
    for name, each in {"Gemma 270M, as measured": costs, **{name: recorded(name) for name in RECORDED}}.items():
        rows, lines = _replayed(name, each, chosen, known)
        section.rows += rows
        right.lines += lines
    section.remarks.append(
        "oracle: knows how many tokens of each proposal of suffix decoding are right, and plans its passes by that; "
        "over all repetitions: the same for the right one of all continuations of the last two tokens"
    )
    section.data["pass_ms"] = costs.verify_ms
    return section


def _own_line(task: Task, runs: Runs, costs: PassCosts, known: Callable[[str, str], Known]) -> list[str]:
    side, plain = OURS, costs.verify_ms[0]
    best = []
    for done in runs.answers[side]:
        written = known(task.prompt, done.text)
        best.append(plain * (len(written.answer) - 1) / oracle(costs, proposed(written)))
    ratios, limit = runs.ratios(side, "plain"), statistics.median(best)
    found = [figures(done) for done in runs.answers[side]]
    return [
        task.name,
        f"{statistics.median(likeness(done.text, task.answer) for done in runs.answers[side]):.0%}",
        f"{statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})",
        f"{limit:.2f}×",
        _share(statistics.median(ratios), limit),
        f"{tokens_per_pass(runs.answers[side]):.2f}",
        f"{sum(one.draft_n_accepted for one in found)} of {sum(one.draft_n for one in found)}",
    ]


def _replayed(
    name: str, costs: PassCosts, chosen: Sequence[Task], known: Callable[[str, str], Known], rounds: int = 3
) -> tuple[list[Row], list[list[str]]]:
    """One chat after the other, each task in turn, as in a session; the mean of the rounds."""
    texts = [known(task.prompt, task.answer) for task in chosen]
    ms = [0.0] * len(texts)
    controller = DepthController(costs, has_draft_model=False)
    for _ in range(rounds):
        for number, one in enumerate(texts):
            ms[number] += replay(controller, costs, one) / rounds
    rows, lines = [], []
    for number, (task, one) in enumerate(zip(chosen, texts, strict=True)):
        plain = costs.verify_ms[0] * (len(one.answer) - 1)
        ours = plain / ms[number]
        near, far = (plain / oracle(costs, right) for right in (proposed(one), repeated(one)))
        what = f"{task.name}, replayed, {name}"
        rows.append(Row(what, "× plain", [ours], target=GAINS if task.copies else PROSE_NOT_SLOWER))
        if task.copies:
            rows.append(Row(f"{what}: share of the oracle's gain", "", [(ours - 1) / (near - 1)], target=SHARE))
        lines.append(
            [
                task.name,
                name,
                f"{ours:.2f}×",
                f"{near:.2f}×",
                _share(ours, near),
                f"{far:.2f}×",
                _share(ours, far),
            ]
        )
    return rows, lines


REAL = ("rename in code", "change one function", "summary with quotations", "free prose")
N_REAL = 129


def real_pair(setup: Setup) -> Section:
    """A real pair that the app would load, over real tasks: drafters that it uses, and the draft model at one depth."""
    target, draft = coder_pair()
    n, rounds = (33, 1) if setup.quick else (N_REAL, setup.choose(3))
    section = Section(tables=[Table("Qwen2.5 Coder 1.5B with its 0.5B, Q4_K_M", HEADS)])
    with workers(setup.threads) as loaded:
        pair = loaded.load(target, draft)
        loaded.run(answer(pair, "Warm up: one, two, three,", 16, to_the_end=False))
        sides = {
            "plain": Side(pair), "free": Side(pair, SUFFIX), "auto": Side(pair, adaptive("draft", "suffix")),
            "draft, depth 4": Side(pair, fixed(4)),
        }  # fmt: skip
        for task in (one for one in tasks() if one.name in REAL):
            say(task.name)
            runs = compare(loaded, sides, [Prompted((), (), words=task.prompt)] * rounds, n, to_the_end=False)
            goal = GAINS if task.copies else PROSE_NOT_SLOWER
            section.rows += [row for row in _rows(task.name, runs, goal) if "depth" not in row.what]
            _lines(section.tables[0], task.name, runs)
            section.data[task.name] = {side: {"rates": runs.rates(side)} for side in runs.answers}
    return section
