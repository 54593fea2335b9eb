"""Adaptive depth against plain decoding and against fixed depths, over pairs with a known acceptance rate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import Row, Target, say
from drafting import (
    ADAPTIVE,
    Section,
    Setup,
    Side,
    Table,
    Workers,
    acceptance,
    compare,
    draft_token_ms,
    figures,
    fixed,
    model_info,
    tokens_per_pass,
    workers,
)
from pairs import Shapes, expected_tokens, known, typical_texts
from product import answer

from cpuchat.present.drafts_off import off_words
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

ALPHAS = (0.3, 0.6, 0.8, 0.9, 0.95, 1.0)
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 15, 23, 31)
N_TOKENS = {"Q4_K_M": 129, "Q8_0": 97, "F16": 65}
"""Length of an answer: about equal in seconds, and one more than a multiple of 32 (one comes with the prompt)."""
MAX_DEPTHS = 3
WORTH_MEASURING = 0.85
"""Of the best predicted speed: depths that are predicted below it are not measured."""
SCOUT_DEPTH, SCOUT_TOKENS = 7, 33
SHOWN_WIDTHS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
NEVER_SLOWER, LIKE_THE_BEST = Target(0.98), Target(0.95)
GAINS = {0.9: Target(1.5), 0.95: Target(1.65), 1.0: Target(2.5)}
"""Of the Q8_0 target with the 0.05B draft against plain decoding."""


@dataclass
class Found:
    """One pair. Rates in tok/s by round; `predicted` and `fixed` by depth; what is predicted comes from T(n)."""

    target: str
    quantization: str
    draft: str
    alpha: float
    n_tokens: int
    plain: list[float]
    adaptive: list[float]
    first: float
    fixed: dict[int, list[float]]
    predicted: dict[int, float]
    pass_ms: Sequence[float]
    draft_ms: float
    acceptance: float
    known_acceptance: float
    per_pass: dict[int, tuple[float, float]]
    adaptive_per_pass: float
    adaptive_depth: int
    reason: str
    answers: int
    wrong_texts: int
    wrong_passes: int

    @property
    def name(self) -> str:
        return f"{self.quantization}, {self.draft.upper()} draft, α {self.alpha:g}"

    def ratio(self, rates: Sequence[float]) -> float:
        """Median of the rounds' ratios to plain decoding."""
        return statistics.median(a / b for a, b in zip(rates, self.plain, strict=True))

    def best(self) -> tuple[int, list[float]]:
        """The fixed depth that was fastest, plain decoding (0) among them."""
        return max({0: self.plain, **self.fixed}.items(), key=lambda item: self.ratio(item[1]))

    def rows(self) -> list[Row]:
        gain = NEVER_SLOWER if self.alpha <= 0.3 else None
        if (self.quantization, self.draft) == ("Q8_0", "0.05b"):
            gain = GAINS.get(self.alpha, gain)
        depth, best = self.best()
        against_best = f"against depth {depth}" if depth else "against plain, the best fixed depth"
        return [
            Row(f"{self.name}: against plain", "tok/s", self.adaptive, self.plain, gain),
            Row(f"{self.name}: {against_best}", "tok/s", self.adaptive, best, LIKE_THE_BEST),
        ]

    def line(self) -> list[str]:
        """Of the table of ratios to plain decoding."""
        depth, _ = self.best()
        limit = max(self.predicted.items(), key=lambda item: item[1], default=(0, 1.0))
        measured = ", ".join(f"{depth}: {self.ratio(rates):.2f}" for depth, rates in sorted(self.fixed.items()))
        return [
            self.name,
            f"{statistics.median(self.plain):.1f} tok/s",
            f"{self.ratio(self.adaptive):.2f}×",
            f"{self.first:.2f}×",
            f"{self.adaptive_per_pass:.2f}",
            f"{depth}" if depth else "plain",
            measured,
            f"{limit[1]:.2f}× at depth {limit[0]}" if limit[1] > 1 else "plain",
            f"{self.draft_ms:.1f} ms",
        ]


RATIO_HEADS = (
    "pair",
    "plain",
    "adaptive",
    "its first answer",
    "tokens per pass",
    "best fixed depth",
    "fixed depths, × plain",
    "T(n) and the draft allow",
    "draft, per token",
)


def predict(pass_ms: Sequence[float], draft_ms: float, alpha: float) -> dict[int, float]:
    """Speed against plain decoding at every depth of `DEPTHS` that T(n) is known for: what the costs allow."""
    return {
        depth: expected_tokens(alpha, depth) * pass_ms[0] / (pass_ms[depth] + depth * draft_ms)
        for depth in DEPTHS
        if depth < len(pass_ms)
    }


def chosen_depths(predicted: dict[int, float], most: int) -> list[int]:
    """The depths worth measuring: the best by prediction and what comes near to it."""
    if not predicted:
        return [1, 3, 7, 15][:most]
    best = max(predicted.values())
    near = [depth for depth, ratio in predicted.items() if ratio >= WORTH_MEASURING * best]
    return sorted(sorted(near, key=lambda depth: -predicted[depth])[:most])


def measure_pair(
    workers: Workers,
    target: Path,
    quantization: str,
    shapes: Shapes,
    alpha: float,
    *,
    rounds: int,
    most: int,
    n: int,
    longest: int = MAX_DEPTH,
) -> Found:
    """One target with one draft: plain, adaptive and the fixed depths in turn, all in one worker. `longest`: draft that
    the target can roll back."""
    backend = workers.load(target, shapes.draft_file(alpha))
    texts = typical_texts(
        shapes.n_vocab, alpha, n, rounds + 1, [depth for depth in DEPTHS if depth < n and depth <= longest]
    )
    warm_up, texts = texts[-1], texts[:-1]
    workers.run(answer(backend, warm_up.prompt_text, 8))
    # Before anything was learnt about this draft: what a first answer is like.
    first = workers.run(answer(backend, warm_up.prompt_text, n, speculation=ADAPTIVE))
    scout = workers.run(
        answer(backend, warm_up.prompt_text, min(n, SCOUT_TOKENS), speculation=fixed(min(SCOUT_DEPTH, n - 1)))
    )
    info = model_info(backend)
    predicted = predict(info.pass_ms[: longest + 1], draft_token_ms(scout), alpha)
    depths = chosen_depths(predicted, most)
    say(f"{quantization}, {shapes.draft} draft, alpha {alpha:g}: depths {depths}")
    sides = {"plain": Side(backend), "adaptive": Side(backend, ADAPTIVE)}
    sides |= {f"depth {depth}": Side(backend, fixed(depth)) for depth in depths}
    runs = compare(workers, sides, texts, n)
    must = [known(text, depth) for depth in depths for text in texts]
    steady = {depth: runs.answers[f"depth {depth}"] for depth in depths}
    counts = [acceptance(answers, depth) for depth, answers in steady.items()]
    last = figures(runs.answers["adaptive"][-1])
    return Found(
        target=shapes.target,
        quantization=quantization,
        draft=shapes.draft,
        alpha=alpha,
        n_tokens=n,
        plain=runs.rates("plain"),
        adaptive=runs.rates("adaptive"),
        first=first.rate / statistics.median(runs.rates("plain")),
        fixed={depth: runs.rates(f"depth {depth}") for depth in depths},
        predicted=predicted,
        pass_ms=info.pass_ms,
        draft_ms=draft_token_ms(scout),
        acceptance=sum(accepted for accepted, _ in counts) / sum(compared for _, compared in counts),
        known_acceptance=sum(one.accepted for one in must) / sum(one.compared for one in must),
        per_pass={
            depth: (
                tokens_per_pass(answers),
                sum(len(text.right_after_first) for text in texts) / sum(known(text, depth).passes for text in texts),
            )
            for depth, answers in steady.items()
        },
        adaptive_per_pass=tokens_per_pass(runs.answers["adaptive"]),
        adaptive_depth=last.depth,
        reason=off_words(last.off),
        answers=runs.count(),
        wrong_texts=runs.wrong(),
        wrong_passes=sum(
            figures(done).passes != known(text, depth).passes
            for depth, answers in steady.items()
            for text, done in zip(texts, answers, strict=True)
        ),
    )


def section_of(found: list[Found], draft: str, most: int) -> Section:
    """The tables of what was found."""
    costs = Table("T(n)/T(1): a pass of the target over n tokens", ["target", "T(1)", *map(str, SHOWN_WIDTHS)])
    for quantization in dict.fromkeys(one.quantization for one in found):
        ms = next(one.pass_ms for one in found if one.quantization == quantization)
        if ms:
            widths = [f"{ms[width - 1] / ms[0]:.2f}" if width <= len(ms) else "–" for width in SHOWN_WIDTHS]
            costs.lines.append([quantization, f"{ms[0]:.1f} ms", *widths])
    checked = Table(
        "the same answers at fixed depths: what the pair is known to do, and what was measured",
        ("pair", "acceptance: measured / known", "tokens per pass: measured / known / by formula"),
    )
    for one in found:
        passes = "; ".join(
            f"depth {depth}: {measured:.2f} / {exact:.2f} / {expected_tokens(one.alpha, depth):.2f}"
            for depth, (measured, exact) in sorted(one.per_pass.items())
        )
        acceptances = f"{one.acceptance:.3f} / {one.known_acceptance:.3f}"
        checked.lines.append([one.name, acceptances, passes])
    answers, texts = sum(one.answers for one in found), sum(one.wrong_texts for one in found)
    fixed_answers = sum(len(rates) for one in found for rates in one.fixed.values())
    remarks = [
        f"{texts} of {answers} answers are not, to the letter, what the target is known to say",
        f"{sum(one.wrong_passes for one in found)} of {fixed_answers} answers at a fixed depth took another number "
        "of passes than the pair is known to need",
        "measured are the depths that T(n), the draft's cost and alpha predict to be best (at most "
        f"{most}, none below {WORTH_MEASURING:g} of the best); plain decoding is depth 0 and takes part",
    ]
    remarks += [f"{one.name}: {one.reason}" for one in found if one.reason]
    return Section(
        rows=[row for one in found for row in one.rows()],
        tables=[Table("speed against plain decoding", RATIO_HEADS, [one.line() for one in found]), costs, checked],
        remarks=remarks,
        data={"draft": draft, "pairs": [asdict(one) for one in found]},
    )


def adaptive_depth(setup: Setup) -> Section:
    """Every quantization, every alpha."""
    shapes, rounds, most = setup.shapes, setup.choose(3, 2), setup.depths or MAX_DEPTHS
    grid: dict[str, Sequence[float]] = {"Q8_0": (0.6, 1.0)} if setup.quick else dict.fromkeys(N_TOKENS, ALPHAS)
    found = []
    for quantization, alphas in grid.items():
        target = shapes.target_file(quantization)
        n = 33 if setup.quick else N_TOKENS[quantization]
        for alpha in alphas:
            with workers(setup.threads) as loaded:
                found.append(measure_pair(loaded, target, quantization, shapes, alpha, rounds=rounds, most=most, n=n))
    return section_of(found, shapes.draft, most)
