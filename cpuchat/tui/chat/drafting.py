"""Draws the drafting figures: a section of the panel, and a part of the one-line display."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from cpuchat.base.text import clean_line
from cpuchat.protocol.timings import SERVER_WIDE
from cpuchat.telemetry import units
from cpuchat.tui.chat.frame import LABEL, NUMBER, Frame, Line, rate
from cpuchat.tui.widgets.charts import LEVELS

if TYPE_CHECKING:
    from cpuchat.telemetry.speculation import Drafting

ROWS, SENTENCE_ROWS = 7, 3
_BY_POSITION = "by position"


def drafting(frame: Frame) -> list[Line]:
    """Draw seven rows, the most important first; one when no drafters are chosen. While drafting is off, the last three
    say why; if nothing was drafted, a single sentence.
    """
    now = frame.figures.drafting
    if not now.wanted:
        return [[frame.text("label", f"{'drafting':<{LABEL}}"), frame.text("missing", "off (F9 or F2)")]]
    if frame.figures.server is not None and now.acceptance is None:
        why = now.reason or ("nothing drafted" if frame.settled and now.answered else "")
        if why or frame.settled:
            return explained(frame, f"acceptance n/a: {why}", 4) if why else []
    if now.reason and now.acceptance is None:
        return _sentence(frame, now.reason, ROWS)
    if frame.figures.server is not None or now.source == "server":  # it counts, and tells no times of its own
        source = [] if now.source == SERVER_WIDE else [_source(frame, now)]  # it stands beside the acceptance
        per_pass = _row(frame, "per pass", "tokens_per_pass", _per_pass(now), "tokens")
        return [_acceptance(frame, now), per_pass, *source, _bars(frame, now)]
    share = None if now.draft_share is None else _percent(now.draft_share)
    return [
        _acceptance(frame, now),
        _row(frame, "per pass", "tokens_per_pass", _per_pass(now), "tokens"),
        _row(frame, "plain", "plain_tok_s", rate(now.plain_tok_s), "tok/s"),
        _row(frame, "drafting", "draft_share", share, "% time"),
        *(
            _sentence(frame, now.reason, SENTENCE_ROWS)
            if now.reason
            else [_depth(frame), _bars(frame, now), _by_drafter(frame, now)]
        ),
    ]


def drafting_in_line(frame: Frame) -> Line:
    """Draw acceptance and tokens per pass for one line; nothing without drafters or before the first draft."""
    now = frame.figures.drafting
    if not now.wanted:
        return []
    if now.acceptance_now is None:
        return [frame.text("label", "drafts off")] if now.reason and frame.figures.server is None else []
    wide = f" {SERVER_WIDE}" if now.source == SERVER_WIDE else ""
    line = [frame.text("label", "acc "), *_figure(frame, f"{_percent(now.acceptance_now):>3}", f" %{wide}")]
    if now.reason:
        return [*line, frame.text("label", " drafts off")]
    per_pass = _per_pass(now)
    return line if per_pass is None else [*line, *_figure(frame, f"{per_pass:>5}", "/pass")]


def speed_up(frame: Frame, part: str) -> Line:
    """Draw ` 1.64×` in six cells, in the style of `part` (slower than plain: as a limit); blank when unknown."""
    factor = frame.figures.drafting.speed_up
    if factor is None:
        return [frame.text("label", " " * 6)]
    return [frame.text(part if factor >= 1 else "limit", f"{units.factor(factor):>6}")]


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"


def _per_pass(now: Drafting) -> str | None:
    return None if now.tokens_per_pass is None else f"{now.tokens_per_pass:.1f}"


def _figure(frame: Frame, number: str, unit: str) -> Line:
    return [frame.text("value", number), frame.text("label", unit)]


def _row(frame: Frame, label: str, field: str, number: str | None, unit: str) -> Line:
    """Draw a row as `Frame.row`, with the reasons of the drafting figures."""
    if number is not None:
        return frame.row(label, "", number, unit)
    if frame.settled:
        return []
    now = frame.figures.drafting
    why = now.why_missing(field)
    common = why in ("", now.why_missing("acceptance_now"), now.why_missing("tokens_per_pass"))
    room = frame.width - LABEL
    text = f"{'n/a':>{NUMBER}}" if common or len(why) > room else why
    return [frame.text("label", f"{label:<{LABEL}}"), frame.text("missing", text)]


def _acceptance(frame: Frame, now: Drafting) -> Line:
    if now.acceptance_now is None or now.acceptance is None:
        return _row(frame, "acceptance", "acceptance_now", None, "%")
    if now.source == SERVER_WIDE:  # what it drafted for others is in it
        figure = _figure(frame, f"{_percent(now.acceptance):>4}", f" % {SERVER_WIDE}")
        return [frame.text("label", "acceptance"), *figure]
    line = [frame.text("label", "acceptance"), *_figure(frame, f"{_percent(now.acceptance_now):>5}", " %")]
    if now.reason and not frame.tall:  # the rows that say why may be left out
        return [*line, frame.text("label", " drafts off")]
    return [*line, frame.text("label", "  avg"), *_figure(frame, f"{_percent(now.acceptance):>4}", " %")]


def _bars(frame: Frame, now: Drafting) -> Line:
    """Draw the acceptance of the first, second, ... drafted token, from zero to all."""
    if not now.by_position:
        return []
    room = frame.width - len(_BY_POSITION) - 1
    levels = [
        LEVELS[min(len(LEVELS) - 1, int(accepted / drafted * len(LEVELS)))] if drafted else " "
        for drafted, accepted in now.by_position[:room]
    ]
    return [frame.text("fill", f"{''.join(levels):<{room}} "), frame.text("label", _BY_POSITION)]


def _source(frame: Frame, now: Drafting) -> Line:
    """Draw who counted."""
    return [frame.text("label", f"{'source':<{LABEL}}{now.source}")] if now.source else []


def _by_drafter(frame: Frame, now: Drafting) -> Line:
    """Draw the share of accepted tokens by drafter: the two largest, the active one in bold."""
    total = sum(count.draft_n_accepted for count in now.by_drafter)
    if not total:
        return [frame.text("label", f"by {now.drafter}")] if now.drafter else []
    ranked = sorted(now.by_drafter, key=lambda count: -count.draft_n_accepted)[:2]
    line = [frame.text("label", "by")]
    active = "now" if frame.figures.phase == "decoding" else "value"
    for number, count in enumerate(c for c in ranked if c.draft_n_accepted):
        share = _percent(count.draft_n_accepted / total)
        line += [
            frame.text("label", ", " if number else " "),
            frame.text(active if count.name == now.drafter else "label", count.name),
            *_figure(frame, f" {share:>2}", " %"),
        ]
    return line


def _depth(frame: Frame) -> Line:
    now = frame.figures.drafting
    label = "adaptive depth" if now.adaptive else "fixed depth"
    head = frame.text("label", f"{label:<{LABEL + 2}}")
    width = NUMBER - 2
    if now.depth is None and frame.settled:
        return []
    if now.depth is None:
        return [head, frame.text("missing", f"{'n/a':>{width}}")]
    return [head, *_figure(frame, f"{now.depth:>{width}}", " tokens" if now.depth != 1 else " token")]


def _sentence(frame: Frame, reason: str, height: int) -> list[Line]:
    rows = explained(frame, f"drafts off: {clean_line(reason).removeprefix('off: ')}", height)
    return rows + [[] for _ in range(height - len(rows))]


def explained(frame: Frame, text: str, most: int) -> list[Line]:
    """Draw a sentence over as many rows as it needs, at most so many."""
    rows = textwrap.wrap(clean_line(text), max(8, frame.width), max_lines=most, placeholder=" …")
    return [[frame.text("label", row)] for row in rows]
