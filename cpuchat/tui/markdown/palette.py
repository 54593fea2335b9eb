"""Styles of rendered text, one field per role, from the widget's component classes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from rich.style import Style
from textual.widget import Widget

from cpuchat.protocol.drafters import DRAFTERS

_PREFIX = "transcript--"

_PLAIN, _BOLD, _DIM, _ITALIC = Style(), Style(bold=True), Style(dim=True), Style(italic=True)
_UNDERLINE, _STRIKE, _BOLD_UNDERLINE = Style(underline=True), Style(strike=True), Style(bold=True, underline=True)


@dataclass(frozen=True)
class Palette:
    """Styles to add to `base`. The defaults have no color: for tests and as a fallback."""

    base: Style = _PLAIN
    dim: Style = _DIM
    you: Style = _BOLD
    model: Style = _BOLD
    marker: Style = _BOLD
    notice: Style = _ITALIC
    cursor: Style = _PLAIN
    title: Style = _BOLD_UNDERLINE
    heading: Style = _BOLD
    strong: Style = _BOLD
    emphasis: Style = _ITALIC
    strike: Style = _STRIKE
    code: Style = _PLAIN
    math: Style = _PLAIN
    link: Style = _UNDERLINE
    quote: Style = _ITALIC
    bullet: Style = _PLAIN
    rule: Style = _DIM
    head: Style = _BOLD
    block: Style = _PLAIN
    label: Style = _DIM
    keyword: Style = _BOLD
    string: Style = _PLAIN
    number: Style = _PLAIN
    comment: Style = _ITALIC
    name: Style = _PLAIN
    type: Style = _PLAIN
    inserted: Style = _PLAIN
    deleted: Style = _PLAIN
    undrafted: Style = _BOLD
    changed: Style = _UNDERLINE
    parted: Style = _BOLD_UNDERLINE
    drafters: tuple[Style, ...] = tuple(Style.parse(row.text_style) for row in DRAFTERS)
    """In the order of `DRAFTERS`."""

    def of_drafter(self, name: str) -> Style:
        """Return the style of text that this drafter proposed ("" = the model itself), also an unknown one."""
        return self.undrafted if not name else self.drafters[_POSITIONS.get(name, 0)]


_POSITIONS = {row.name: position for position, row in enumerate(DRAFTERS)}
ROLES = tuple(f.name for f in fields(Palette) if f.name not in ("base", "drafters"))
_DRAFTER_CLASSES = tuple(f"{_PREFIX}drafter-{row.name}" for row in DRAFTERS)
COMPONENT_CLASSES = {*(_PREFIX + role for role in ROLES), *_DRAFTER_CLASSES}

# Percentages are mixed with what lies behind; ANSI colors cannot be, so there the weak roles are dimmed instead.
COMPONENT_CSS = """
    & > .transcript--dim, & > .transcript--comment, & > .transcript--label { color: $hint; }
    & > .transcript--rule { color: $foreground 35%; }
    & > .transcript--comment { text-style: italic; }
    & > .transcript--you { color: $text-primary; text-style: bold; }
    & > .transcript--model { color: $text-secondary; text-style: bold; }
    & > .transcript--marker, & > .transcript--cursor { color: $text-accent; text-style: bold; }
    & > .transcript--notice { color: $text-warning; text-style: italic; }
    & > .transcript--title { color: $text-primary; text-style: bold underline; }
    & > .transcript--heading { color: $text-primary; text-style: bold; }
    & > .transcript--strong, & > .transcript--head { text-style: bold; }
    & > .transcript--emphasis { text-style: italic; }
    & > .transcript--strike { text-style: strike; }
    & > .transcript--code, & > .transcript--math { color: $text-accent; }
    & > .transcript--link { color: $text-primary; text-style: underline; }
    & > .transcript--quote { color: $foreground 80%; text-style: italic; }
    & > .transcript--bullet { color: $text-secondary; text-style: bold; }
    & > .transcript--code, & > .transcript--block, & > .transcript--label { background: $foreground 7%; }
    & > .transcript--keyword { color: $text-secondary; text-style: bold; }
    & > .transcript--string { color: $text-success; }
    & > .transcript--number { color: $text-warning; }
    & > .transcript--name { color: $text-primary; }
    & > .transcript--type { color: $text-accent; }
    & > .transcript--inserted { color: $text-success; }
    & > .transcript--deleted { color: $text-error; }
    & > .transcript--undrafted { text-style: bold; }
    & > .transcript--changed { color: $text-warning; text-style: underline; }
    & > .transcript--parted { color: $text-accent; text-style: bold reverse; }
    &:ansi > .transcript--code, &:ansi > .transcript--block, &:ansi > .transcript--label { background: transparent; }
    &:ansi > .transcript--dim, &:ansi > .transcript--comment, &:ansi > .transcript--label, &:ansi > .transcript--rule {
        color: ansi_default;
        text-style: dim;
    }
    &:ansi > .transcript--quote { color: ansi_default; }
""" + "".join(
    f"    & > .{name} {{ color: {row.color}; text-style: {row.text_style}; }}\n"
    for name, row in zip(_DRAFTER_CLASSES, DRAFTERS, strict=True)
)


def from_widget(widget: Widget) -> Palette:
    """Return the palette of `widget`'s theme; `widget` declares `COMPONENT_CLASSES` and styles them in CSS."""
    roles: dict[str, Any] = {role: _own(widget, _PREFIX + role) for role in ROLES}
    drafters = tuple(_own(widget, name) for name in _DRAFTER_CLASSES)
    return Palette(base=widget.rich_style, drafters=drafters, **roles)


def _own(widget: Widget, name: str) -> Style:
    """Return what the component sets itself, its colors blended with the background."""
    styles = widget.get_component_styles(name)
    full = widget.get_component_rich_style(name)
    own = Style(
        color=full.color if styles.has_rule("color") else None,
        bgcolor=full.bgcolor if styles.has_rule("background") else None,
    )
    return own + styles.text_style
