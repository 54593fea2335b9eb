"""A comparison in words: the table, the sentence that says why, JSON, and a Markdown document with both answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from cpuchat.base.text import clean_line
from cpuchat.compare.agreement import Agreement, UnlikelyWord
from cpuchat.compare.choice import choose
from cpuchat.compare.comparison import Comparison
from cpuchat.compare.figures import MAX_REACHED, MIN_ROUNDS, ComparisonFigures, Name, Value, Verdict, figures_of
from cpuchat.compare.recording import Recording
from cpuchat.compare.runner import Round, SideAnswer, Turn
from cpuchat.models.gguf.parse import PRECISE
from cpuchat.models.quantize.types import SpeedHere
from cpuchat.present.answers import roofline_json, timings_json
from cpuchat.present.models import why_here
from cpuchat.present.quality import one_in, token
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import ChatFigures

_FIGURES: dict[Name, tuple[str, str, float]] = {
    "tok_s": ("decode", "tok/s", 1), "first_s": ("first token", "s", 1), "prefill": ("prefill", "tok/s", 1),
    "tokens": ("tokens", "", 1), "acceptance": ("acceptance", "%", 100), "per_pass": ("tokens per pass", "", 1),
    "memory": ("resident memory", "MB", 1e-6), "bytes": ("mean bytes per token", "MB", 1e-6),
    "bandwidth": ("bandwidth", "GB/s", 1e-9), "utilization": ("utilization", "%", 100), "joules": ("J/token", "J", 1),
}  # fmt: skip
"""Label, unit, and the factor to it."""


def cell(name: Name, value: Value | None, *, spread: bool) -> str:
    """A figure, so exact that ratios are those of two, with the range of its rounds: `46.21 tok/s (45.9–46.7)`."""
    if value is None:
        return "n/a"
    _, unit, factor = _FIGURES[name]
    if name == "tokens":
        median, low, high = (f"{one:,.0f}" for one in (value.median, value.low, value.high))
    else:
        median = units.four_digits(factor * value.median)
        low, high = (units.rate(factor * one) for one in (value.low, value.high))
    text = f"{median} {unit}".rstrip()
    return text if not spread or value.n < MIN_ROUNDS or low == high else f"{text} ({low}–{high})"


def rows(figures: ComparisonFigures, names: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Return the table with its headings: label, A, B, B ÷ A; – for a ratio of what other programs disturbed."""
    table = [("", names[0], names[1], "B ÷ A")]
    for name, row in figures.rows.items():
        a, b = (cell(name, value, spread=figures.medians) for value in (row.a, row.b))
        ratio = units.factor(row.ratio) if row.ratio is not None and name not in ("tokens", "acceptance") else ""
        if ratio and figures.verdict.kind == "disturbed" and name not in ("per_pass", "memory", "bytes"):
            ratio = "–"
        table.append((_FIGURES[name][0], a, b, ratio))
    return table


def verdict(found: Verdict, names: Sequence[str], repeat: str = "", wait: str = "") -> str:
    """Say in one or two sentences which side is faster, and why; "" without an answer of both. `repeat` and `wait` are
    the keys that repeat the prompt, now and once the cores are idle, where there are any."""
    if found.kind == "incomplete":
        return ""
    if found.kind == "short":
        return "Too short for a verdict: a rate needs two tokens of each side."
    if found.kind == "disturbed":
        again = f"{repeat} repeats, {wait} waits for quiet." if repeat else "Repeat it."
        share = min(found.bytes, 1 / found.bytes) if found.bytes else 1.0
        sure = f" Sure: {names[found.bytes < 1]} reads {_bytes(share)}." if share < 1 else ""
        return f"Too noisy for a verdict: other programs were using the cores. {again}{sure}"
    b_leads = found.speed > 1
    fast, slow = (names[1], names[0]) if b_leads else (names[0], names[1])
    speed = units.factor(found.speed if b_leads else 1 / found.speed)
    share = (found.bytes if b_leads else 1 / found.bytes) if found.bytes else 0.0
    match found.kind:
        case "same":
            return f"Equally fast: {speed}, after {found.n_rounds} rounds."
        case "noisy" if found.n_rounds < MIN_ROUNDS:
            n_rounds = "one round" if found.n_rounds == 1 else f"{found.n_rounds} rounds"
            return f"{fast} wrote {speed} as fast; {n_rounds}: {repeat or 'a repeat'} makes it sure."
        case "noisy":
            return f"Too close to tell after {found.n_rounds} rounds: {speed} ({_interval(found, b_leads)}×)."
        case "cached":
            read = f"reads {_bytes(share)} and " if share else ""
            return f"{fast} {read}is {speed} as fast. Both fit in the L3 cache: memory bandwidth is not the limit."
        case "settings":
            return f"{fast} is {speed} as fast as {slow}."
        case "other limit" if share < 1 and found.reached > MAX_REACHED:
            allowed = units.factor(1 / share)
            return (
                f"{fast} reads {_bytes(share)} and is {speed} as fast: bytes allow {allowed}; computing limits {slow}."
            )
        case "other limit":
            return f"{fast} reads {_bytes(share)} and is {speed} as fast: memory is not what limits it."
    reached = f"{100 * found.reached:.0f} % of" if found.reached < 0.995 else "all of"
    return f"{fast} reads {_bytes(share)} and is {speed} as fast: {reached} what the bytes allow."


def waiting(figures: ChatFigures, name: str) -> str:
    """Say what a side does that has written nothing yet."""
    if figures.phase != "prefill":
        return f"{name} is loading."
    rate = figures.prefill_tok_s.value
    return f"{name} reads the prompt{f': {units.rate(rate)} tok/s' if rate else ''}."


def _interval(found: Verdict, b_leads: bool) -> str:
    ends = found.interval if b_leads else tuple(1 / one for one in reversed(found.interval))
    return "–".join(units.factor(one).rstrip("×") for one in ends)


def label(recording: Recording) -> str:
    """Say what the stage shows: `replay of two fair runs · medians of 3 rounds · 1.74× (1.69–1.80)`."""
    if recording.stopped or not recording.complete:
        return f"one after the other · {'stopped' if recording.stopped else 'not complete'}"
    if recording.verdict.kind == "disturbed":
        return "replay of two disturbed runs · too noisy"
    parts = ["replay of two fair runs"]
    n_rounds = recording.verdict.n_rounds
    if n_rounds > 1:
        parts.append(f"medians of {n_rounds} rounds" if n_rounds >= MIN_ROUNDS else f"round {n_rounds}")
    if n_rounds >= MIN_ROUNDS and recording.leader is not None:
        parts.append(f"{ratio(recording)} ({_interval(recording.verdict, bool(recording.leader))})")
    return " · ".join(parts)


def ratio(recording: Recording) -> str:
    """Return how many times as fast the leader is, `1.74×`; "" without a leader."""
    speed = recording.verdict.speed
    return units.factor(speed if recording.leader else 1 / speed) if recording.leader is not None else ""


def _bytes(share: float) -> str:
    """Format the bytes of one side against those of the other: `16 % fewer bytes`."""
    percent = round(100 * abs(share - 1))
    return f"{percent} % {'fewer' if share < 1 else 'more'} bytes" if percent else "as many bytes"


def agreement(found: Agreement, names: Sequence[str]) -> str:
    """`Q4_K_M would have written 96 % of Q8_0's words (94–98); 3 places matter.`"""
    share, _, rest = brief_agreement(found).partition(" (")
    interval, _, matter = rest.partition(" · ")
    steps = [token.step for token in found.answers[0].tokens]
    if not matter and "close" in steps:
        matter = f"no place matters: the texts part at token {steps.index('close') + 1}, a close call"
    return f"{names[1]} would have written {share} of {names[0]}'s words ({interval}{f'; {matter}' if matter else ''}."


def brief_agreement(found: Agreement) -> str:
    """`96 % (94–98) · 3 places matter`: the same of A's answer, beside a label."""
    words, n = found.answers[0].words, len(found.answers[0].places)
    matter = f" · {units.plural(n, 'place')} {'matters' if n == 1 else 'matter'}" if n else ""
    share = f"{100 * words.value if words.value in (0, 1) else min(max(100 * words.value, 1), 99):.0f} %"
    return f"{share} ({100 * words.low:.0f}–{100 * words.high:.0f}){matter}"


def choice(comparison: Comparison, turn: Turn) -> tuple[int, list[str]] | None:
    """Return which of two files of one model to use on this machine (0 or 1), and a line about each, that one first;
    None for other sides, and while not all is known."""
    files, found = comparison.files, figures_of(turn.counted()).verdict
    agreed = turn.agreement
    if files is None or (take := choose(files, found, agreed)) is None:
        return None
    big, small = (comparison.names[side] for side in (files.larger, 1 - files.larger))
    gain = 1 / found.speed if files.larger else found.speed  # of the smaller file
    by_bytes = (found.bytes if files.larger else 1 / found.bytes) if found.bytes else 1.0
    why = why_here(small, SpeedHere(gain, by_bytes)).partition(" (")[0]
    share = brief_agreement(agreed).partition(" (")[0] if agreed is not None else ""
    words = f"{share} of the same words on this answer".removeprefix("100 % of ") if share else ""
    hard = f"{one_in(files.hard)} differs on hard text" if files.hard is not None else ""
    kind = comparison.sides[files.larger].quantization.upper()
    own = "the original's words" if kind in PRECISE else "closer to the original's words"
    own = f"nearly {own}" if kind == "Q8_0" else own  # it may have been made from any file
    memory = f"{units.size(abs(files.memory))} of memory"
    lost = "; ".join(filter(None, (words, hard or "`cpuchat quality` measures hard text")))
    if take != files.larger:
        reasons = f"{units.factor(gain)} as fast (a token reads {_bytes(1 / by_bytes)})", words, f"−{memory}"
        other = f"{big} if every word counts: {own}{f'; {small}: {hard}' if hard else ''}."
    elif found.kind in ("same", "noisy") or gain < 1:
        close = f"speeds too close to tell ({_interval(found, bool(take))}×)"
        speed = {"same": "as fast", "noisy": close}.get(found.kind, f"{units.factor(1 / gain)} as fast ({why})")
        reasons = speed, own, f"+{memory}"
        other = f"{small} if memory is short: {lost}."
    else:
        reasons = own, f"+{memory}"
        other = f"{small} if speed matters more: {units.factor(gain)} as fast, {lost}."
    first = f"Take {comparison.names[take]} here: {', '.join(filter(None, reasons))}."
    return take, [first, other]


def place(one: UnlikelyWord, other: str) -> str:
    """`…each weight is ▸ “fetched” 62 % · Q4_K_M “read” 71 %, “fetched” 4 %`: after ▸ the writer's choice."""
    before = ("…" if one.character > len(one.before) else "") + clean_line(one.before.replace("\n", "⏎"))
    return (
        f"{before} ▸ {token(one.text)} {_share(one.p)} · "
        f"{other} {token(one.top)} {_share(one.p_top)}, {token(one.text)} {_share(one.p_other)}"
    )


def _share(p: float) -> str:
    return f"{100 * p:.0f} %" if p >= 0.01 else "<1 %"


def places(found: Agreement, names: Sequence[str]) -> list[str]:
    """Return a line for each place of A's answer that matters."""
    return [place(one, names[1]) for one in found.answers[0].places]


def failures(done: Round, names: Sequence[str]) -> list[str]:
    """Say which side failed, and why."""
    found = zip(names, done.answers, strict=True)
    return [f"{name}: {one.failed.message} {one.failed.hint}".rstrip() for name, one in found if one.failed is not None]


def sentences(comparison: Comparison, turn: Turn, *keys: str) -> tuple[list[str], list[str]]:
    """Return everything that is shown above the table of a turn, which is that there is no verdict, and below; `keys`
    as of `verdict`. What `choice` says is left out."""
    if not turn.rounds:
        return [], []
    figures, last = figures_of(turn.counted()), turn.rounds[-1]
    n_noisy, n_rounds = sum(one.disturbed for one in turn.rounds), len(turn.rounds)
    is_left_out = n_noisy and figures.verdict.kind != "disturbed"
    found = [
        f"Left out as too noisy: {n_noisy} of {n_rounds} rounds." if is_left_out else "",
        verdict(figures.verdict, comparison.names, *keys) if choice(comparison, turn) is None else "",
        *failures(last, comparison.names),
        agreement(turn.agreement, comparison.names) if turn.agreement is not None else last.agreement_note,
        comparison.in_turn,
    ]
    found = [one for one in found if one]
    n_above = int(figures.verdict.kind == "disturbed")
    return found[:n_above], found[n_above:]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the verdict on the last prompt, and everything that was measured."""
    return {
        "verdict": _verdict_json(comparison, comparison.turns[-1]),
        "sides": [
            {"name": name, "path": side.path, "model": side.model, "quantization": side.quantization,
             "settings": side.changes}
            for name, side in zip(comparison.names, comparison.sides, strict=True)
        ],
        "in_turn": bool(comparison.in_turn),
        "turns": [_turn_json(turn) for turn in comparison.turns],
    }  # fmt: skip


def _verdict_json(comparison: Comparison, turn: Turn) -> dict[str, Any]:
    """Return which side is faster and which file to take, and why; first why that cannot be told, or not yet."""
    found, chosen, files = figures_of(turn.counted()).verdict, choice(comparison, turn), comparison.files
    said = verdict(found, comparison.names) or " ".join(failures(turn.rounds[-1], comparison.names)) or "Stopped."
    is_sure = found.kind not in ("incomplete", "short", "disturbed", "noisy")
    is_told = found.speed > 0 and found.kind != "disturbed"
    words = turn.agreement.answers[0] if turn.agreement is not None else None
    return {
        "caveat": None if is_sure else said,
        "faster": "AB"[found.speed > 1] if is_sure and found.kind != "same" else None,
        "ratio": found.speed if is_told else None,
        "interval": found.interval if is_told else None,
        "kind": found.kind,
        "reason": said if is_sure else None,
        "take": "AB"[chosen[0]] if chosen is not None else None,
        "lines": chosen[1] if chosen is not None else [],
        "memory": files.memory * (2 * files.larger - 1) if files is not None else None,
        "agreement": {"places": len(words.places), **msgspec.to_builtins(words.words)} if words is not None else None,
        "hard_text": msgspec.to_builtins(files.hard) if files is not None else None,
    }


def _turn_json(turn: Turn) -> dict[str, Any]:
    def agreed(found: Agreement) -> dict[str, Any]:
        shown: dict[str, Any] = msgspec.to_builtins(found)
        for answer, own in zip(shown["answers"], found.answers, strict=True):
            answer["tokens"] = [msgspec.structs.asdict(token) | {"step": token.step} for token in own.tokens]
        return shown

    return {
        "prompt": turn.prompt,
        "rounds": [
            {
                "first": "AB"[one.first],
                "stopped": one.stopped,
                "disturbed": one.disturbed,
                "answers": [_answer_json(answer) for answer in one.answers],
                "agreement": agreed(one.agreement) if one.agreement is not None else None,
            }
            for one in turn.rounds
        ],
        "figures": {
            name: {"a": row.a and asdict(row.a), "b": row.b and asdict(row.b), "ratio": row.ratio}
            for name, row in figures_of(turn.counted()).rows.items()
        },
    }


def _answer_json(answer: SideAnswer) -> dict[str, Any]:
    return {
        "text": answer.content,
        "reasoning": answer.reasoning,
        "token_ms": [at_ms for _, at_ms in answer.written.tokens()],
        "stop_reason": answer.stop_reason or None,
        "error": {"code": answer.failed.code, "message": answer.failed.message} if answer.failed is not None else None,
        "memory": answer.memory,
        "timings": timings_json(answer.timings) if answer.timings is not None else None,
        "roofline": roofline_json(answer.roofline) if answer.roofline is not None else None,
    }
