"""Line charts as SVG, dark on light: panels side by side with a common scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

INK, FAINT, PALE, GRID, PAPER = "#1f2328", "#59636e", "#8c959f", "#d8dee4", "#ffffff"
COLOURS = {"Q4_K_M": "#a8480b", "Q8_0": "#0b5cad", "F16": "#1a7f37"}
FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"

WIDTH, HEIGHT = 340, 330
"""Of one panel, in pixels, without its margins."""
LEFT, TOP, BETWEEN, BOTTOM = 66, 92, 34, 84


@dataclass(frozen=True)
class Line:
    """One line: its value at every place of the x axis (None: no value). A `label` stands at its right end instead of
    the name in the legend; such a line has no marks."""

    name: str
    values: Sequence[float | None]
    colour: str
    width: float = 2.5
    dash: str = ""
    label: str = ""


@dataclass(frozen=True)
class Dot:
    """One point, at a place of the x axis; the highest of a place shows its label."""

    place: int
    value: float
    label: str


@dataclass
class Panel:
    title: str
    lines: list[Line] = field(default_factory=list)
    dots: list[Dot] = field(default_factory=list)
    dots_name: str = ""


@dataclass(frozen=True)
class Chart:
    """Panels with the same axes. `places` are the labels of the x axis, evenly spaced; `mark` is a line at y = 1."""

    title: str
    subtitle: str
    x_title: str
    y_title: str
    places: Sequence[str]
    panels: Sequence[Panel]
    mark: str = ""

    def top(self) -> float:
        values = [dot.value for panel in self.panels for dot in panel.dots]
        values += [value for panel in self.panels for line in panel.lines for value in line.values if value is not None]
        step = 0.5
        return step * (int(max([1.0, *values]) / step) + 1)

    def svg(self) -> str:
        """The whole file."""
        width = LEFT + len(self.panels) * (WIDTH + BETWEEN)
        height = TOP + HEIGHT + BOTTOM
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="{FONT}" font-size="13" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            _text(LEFT, 28, self.title, size=17, bold=True),
            _text(LEFT, 48, self.subtitle, colour=FAINT),
            _text(18, TOP + HEIGHT / 2, self.y_title, anchor="middle", turned=True),
        ]
        for number, panel in enumerate(self.panels):
            parts += self._panel(panel, LEFT + number * (WIDTH + BETWEEN), number == 0)
        return "\n".join([*parts, "</svg>", ""])

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.svg(), encoding="utf-8")

    def _panel(self, panel: Panel, left: float, first: bool) -> list[str]:
        top = self.top()
        parts = [_text(left, TOP - 14, panel.title, bold=True)]
        value = 0.0
        while value <= top + 1e-9:
            y = self._y(value)
            parts.append(_stroke([(left, y), (left + WIDTH, y)], GRID, 1))
            if first:
                parts.append(_text(left - 8, y + 4, f"{value:g}×", anchor="end"))
            value += 0.5
        if self.mark:
            parts.append(_stroke([(left, self._y(1)), (left + WIDTH, self._y(1))], FAINT, 1.5))
            parts.append(_text(left + WIDTH - 4, self._y(1) + 15, self.mark, anchor="end", colour=FAINT, size=11))
        for place, label in enumerate(self.places):
            parts.append(_text(self._x(left, place), TOP + HEIGHT + 20, label, anchor="middle"))
        parts.append(_text(left + WIDTH / 2, TOP + HEIGHT + 42, self.x_title, anchor="middle"))
        parts += self._dots(panel, left)
        for line in panel.lines:
            parts += self._line(line, left)
        parts += self._labels(panel, left)
        parts += _legend(panel, left, TOP + HEIGHT + 66)
        return parts

    def _line(self, line: Line, left: float) -> list[str]:
        points = [(self._x(left, place), self._y(y)) for place, y in enumerate(line.values) if y is not None]
        if line.label:
            x, y = points[-1]
            return [
                _stroke(points, line.colour, line.width, line.dash),
                _text(x + 5, y + 4, line.label, colour=FAINT, size=11, haloed=True),
            ]
        marks = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>' for x, y in points]
        return [_stroke(points, line.colour, line.width, line.dash), *marks]

    def _dots(self, panel: Panel, left: float) -> list[str]:
        return [_ring(self._x(left, dot.place), self._y(dot.value)) for dot in panel.dots]

    def _labels(self, panel: Panel, left: float) -> list[str]:
        highest: dict[int, Dot] = {}
        for dot in panel.dots:
            if dot.place not in highest or dot.value > highest[dot.place].value:
                highest[dot.place] = dot
        return [
            _text(self._x(left, dot.place) - 8, self._y(dot.value) - 7, dot.label, anchor="end", size=12, haloed=True)
            for dot in highest.values()
        ]

    def _x(self, left: float, place: int) -> float:
        return left + WIDTH * (place + 0.5) / len(self.places)

    def _y(self, value: float) -> float:
        return TOP + HEIGHT * (1 - value / self.top())


def _legend(panel: Panel, left: float, y: float) -> list[str]:
    parts = []
    x = left
    for line in panel.lines:
        if line.label:
            continue
        parts.append(_stroke([(x, y - 4), (x + 22, y - 4)], line.colour, line.width, line.dash))
        parts.append(_text(x + 28, y, line.name, size=12))
        x += 40 + 6.6 * len(line.name)
    if panel.dots:
        parts += [_ring(x + 4, y - 4), _text(x + 14, y, panel.dots_name, size=12)]
    return parts


def _ring(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{PAPER}" stroke="{FAINT}" stroke-width="1.4"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = INK,
    size: int = 13,
    bold: bool = False,
    turned: bool = False,
    haloed: bool = False,
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    weight = ' font-weight="bold"' if bold else ""
    halo = f' stroke="{PAPER}" stroke-width="3" paint-order="stroke"' if haloed else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}{halo}'
    return f'<text {place} fill="{colour}" font-size="{size}"{weight}>{escape(text)}</text>'


def _stroke(points: Sequence[tuple[float, float]], colour: str, width: float, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'
