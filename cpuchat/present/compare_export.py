"""A comparison as a Markdown document: settings, both answers, table."""

from __future__ import annotations

from collections.abc import Sequence

from cpuchat.compare.comparison import Comparison
from cpuchat.compare.figures import figures_of
from cpuchat.compare.rounds import Turn
from cpuchat.present import compare
from cpuchat.present.answers import stop_reason
from cpuchat.text import clean, clean_line


def title(comparison: Comparison) -> str:
    """`Q8_0 against Q4_K_M`."""
    return " against ".join(comparison.names)


def markdown(comparison: Comparison) -> str:
    """Return the whole comparison."""
    parts = [f"# {clean_line(title(comparison))}", *_sides(comparison)]
    for turn in comparison.turns:
        parts += _turn(comparison, turn)
    return "\n\n".join(parts) + "\n"


def _sides(comparison: Comparison) -> list[str]:
    found = []
    for letter, side, runner in zip("AB", comparison.sides, comparison.runners, strict=True):
        model = runner.model
        facts = [clean_line(side.label)]
        if model is not None:
            facts += [f"{model.n_threads} threads", f"KV {runner.settings.engine.cache_type_k}"]
        sampling = runner.settings.sampling.temperature
        facts += ["greedy" if not sampling else f"temperature {sampling:g}"]
        facts += [f"drafters {runner.settings.speculation.drafters}"]
        found.append(f"- **{letter}**: {' · '.join(dict.fromkeys(facts))}")
    return ["\n".join(found)]


def _turn(comparison: Comparison, turn: Turn) -> list[str]:
    parts = ["## Prompt", "\n".join(f"> {line}" for line in clean(turn.prompt).splitlines())]
    if not turn.rounds:
        return parts
    for letter, name, answer in zip("AB", comparison.names, turn.rounds[-1].answers, strict=True):
        text = clean(answer.content).strip() or (f"({answer.failed.message})" if answer.failed else "(no answer)")
        ended = stop_reason(answer.stop_reason) if answer.failed is None else "failed"
        parts += [f"### {letter} · {clean_line(name)}", text, *([f"*{ended}*"] if ended else [])]
    figures = figures_of(turn.comparable() or turn.rounds[-1:])
    parts += ["### B against A", _table(compare.rows(figures, comparison.names))]
    parts += compare.sentences(comparison, turn)
    if figures.medians:
        parts.append(f"Medians of {figures.n_rounds} rounds, with their range.")
    return parts


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ([clean_line(cell).replace("|", "\\|") for cell in row] for row in rows)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
