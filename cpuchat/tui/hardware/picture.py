"""Draws the machine: every core as a cell, by L3 group, NUMA node and socket."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Core, L3Group, Topology

Line = list[tuple[str, str]]
"""(text, part) in reading order; parts are the component classes of `MachinePicture` without their prefix."""

CELLS = {"target": "▣", "draft": "▤", "free": "□", "off": "·"}
NAMES = {"target": "target", "draft": "draft", "free": "free", "off": "unavailable"}
_GAP = 3
_LEGEND_GAP = 3
ROOMY_ROWS = 8
"""Maximum number of rows at which cells are drawn with gaps."""


@dataclass(frozen=True)
class Use:
    """Logical CPUs of the target, and those of the draft model alone."""

    target: frozenset[int] = frozenset()
    draft: frozenset[int] = frozenset()

    @classmethod
    def of(cls, target: Collection[int], draft: Collection[int] | None = ()) -> Use:
        """Build the use of CPUs; `draft` None or empty: it shares the target's cores."""
        return cls(frozenset(target), frozenset(draft or ()))

    def part(self, core: Core, allowed: Collection[int]) -> str:
        """Return what this core does, a key of `CELLS`."""
        if self.draft.intersection(core.cpus) and not self.target.intersection(core.cpus):
            return "draft"
        if self.target.intersection(core.cpus):
            return "target"
        return "free" if any(cpu in allowed for cpu in core.cpus) else "off"


def picture(
    topology: Topology,
    use: Use,
    width: int,
    roomy_rows: int = ROOMY_ROWS,
) -> list[Line]:
    """Draw the rows, at most `width` cells wide if that is 24 or more.

    Where cells drawn apart would take more than `roomy_rows` rows they stand close together.
    """
    allowed = frozenset(topology.allowed)
    blocks = _blocks(topology)
    gutter = max((len(text) for block in blocks for text in block.names), default=0)
    room = max(width - (gutter + 3 if gutter else 0), 12)
    label = max((len(group.name) for block in blocks for group in block.groups), default=0)
    rows: list[Line] = []
    for spaced in (True, False):
        rows = []
        for index, block in enumerate(blocks):
            lines = _group_rows(block, use, allowed, room, label, spaced)
            if gutter:
                names = [*block.names, *[""] * (len(lines) - len(block.names))]
                lines += [[] for _ in range(len(names) - len(lines))]
                lines = [[(f"{name:<{gutter}}   ", "label"), *line] for name, line in zip(names, lines, strict=True)]
                if index and (len(lines) > 1 or block.opens_socket):
                    rows.append([])
            rows += lines
        if len(rows) <= roomy_rows:
            break
    return rows


@dataclass(frozen=True)
class _Group:
    """One L3 group; `index` -1 for cores without one."""

    name: str
    cores: tuple[Core, ...]
    fabric_link: int
    index: int


@dataclass(frozen=True)
class _Block:
    """The groups of one node of one socket, and the names left of them."""

    names: tuple[str, ...]
    groups: tuple[_Group, ...]
    opens_socket: bool


def _blocks(topology: Topology) -> list[_Block]:
    many_sockets, many_nodes = len(topology.packages) > 1, len({n.number for n in topology.nodes if n.cpus}) > 1
    digits = len(str(max(len(topology.l3_groups) - 1, 0)))
    by_place: dict[tuple[int, int], list[_Group]] = {}
    for group in topology.l3_groups:
        cores = tuple(topology.cores[index] for index in group.cores)
        drawn = _Group(f"L3 {group.index:>{digits}}", cores, _link(topology, group), group.index)
        by_place.setdefault((group.package, group.node), []).append(drawn)
    # Cores without a known L3 cache: a machine that does not tell, or efficiency cores that have none.
    grouped = {index for group in topology.l3_groups for index in group.cores}
    rest = [core for core in topology.cores if core.index not in grouped]
    for place in {(core.package, core.node) for core in rest}:
        cores = tuple(core for core in rest if (core.package, core.node) == place)
        by_place.setdefault(place, []).append(_Group("no L3" if topology.l3_groups else "cores", cores, -1, -1))
    blocks: list[_Block] = []
    seen: set[int] = set()
    for (package, node), groups in sorted(by_place.items()):
        opens = many_sockets and package not in seen
        names = ([f"socket {package}"] if opens else []) + ([f"node {node}"] if many_nodes else [])
        seen.add(package)
        blocks.append(_Block(tuple(names), tuple(groups), opens))
    return blocks


def _kinds(cores: Sequence[Core]) -> list[tuple[str, list[Core]]]:
    """Return the cores by kind: "P", "E", or "" where it is not known."""
    letters = {"performance": "P", "efficient": "E"}
    kinds = sorted({core.kind for core in cores}, key=lambda kind: ("performance", "", "efficient").index(kind))
    return [(letters.get(kind, ""), [core for core in cores if core.kind == kind]) for kind in kinds]


def _link(topology: Topology, group: L3Group) -> int:
    """Return the fabric link that this group shares with another one; -1 if it has its own."""
    members = next((link for link in topology.fabric_links if group.index in link), ())
    return group.fabric_link if len(members) > 1 else -1


def _group_rows(
    block: _Block,
    use: Use,
    allowed: Collection[int],
    room: int,
    label: int,
    spaced: bool,
) -> list[Line]:
    step = 2 if spaced else 1
    drawn: list[tuple[list[Line], int]] = []  # the lines of each group, and how wide they are
    for group in block.groups:
        cells: Line = []
        for letter, cores in _kinds(group.cores):
            if cells:
                cells.append(("  ", "label"))
            if letter:
                cells.append((f"{letter} ", "label"))
            for core in cores:
                part = use.part(core, allowed)
                cells.append((CELLS[part] + " " * (step - 1), part))
        lines = _wrap(cells, max(room - label - 4, 4))
        head: Line = [(f"{group.name:<{label}}  ", "label")]
        lines = [[*(head if number == 0 else [(" " * (label + 2), "label")]), *line] for number, line in
                 enumerate(lines)]  # fmt: skip
        drawn.append((lines, max(_width(line) for line in lines)))
    widest = max((width for _, width in drawn), default=0)
    linked = max(Counter(group.fabric_link for group in block.groups if group.fabric_link >= 0).values(), default=1)
    fit = max((room + _GAP) // (widest + _GAP), 1)
    fit = max(fit // linked * linked, 1)
    columns = math.ceil(len(drawn) / math.ceil(len(drawn) / fit)) if drawn else 1
    columns = min(math.ceil(columns / linked) * linked, fit)
    rows: list[Line] = []
    for start in range(0, len(drawn), columns):
        some = drawn[start : start + columns]
        for y in range(max(len(lines) for lines, _ in some)):
            row: Line = []
            for x, (lines, _) in enumerate(some):
                line = lines[y] if y < len(lines) else []
                row += line
                if x + 1 < len(some):
                    here, after = block.groups[start + x], block.groups[start + x + 1]
                    same = y == 0 and here.fabric_link >= 0 and here.fabric_link == after.fabric_link
                    row.append((" " * (widest - _width(line)), "label"))
                    row.append((("── " if spaced else " ─ ") if same else " " * _GAP, "link"))
            rows.append(row)
    return rows


def _wrap(cells: Line, width: int) -> list[Line]:
    lines: list[Line] = [[]]
    for cell in cells:
        if lines[-1] and _width(lines[-1]) + len(cell[0].rstrip()) > width:
            lines.append([])
        lines[-1].append(cell)
    return lines


def _cut(line: Line, width: int) -> Line:
    """Remove trailing blanks beyond `width`."""
    over = max(_width(line) - width, 0)
    return [*line[:-1], (line[-1][0][: len(line[-1][0]) - over], line[-1][1])] if over else line


def _width(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def legend(topology: Topology, use: Use) -> list[Line]:
    """Return one line for each kind of cell that occurs."""
    allowed = frozenset(topology.allowed)
    found = {use.part(core, allowed) for core in topology.cores}
    items: list[Line] = [[(f"{cell} ", part), (NAMES[part], "label")] for part, cell in CELLS.items() if part in found]
    if any(len(link) > 1 for link in topology.fabric_links):
        items.append([("── ", "link"), ("shared fabric link", "label")])
    return items


def with_legend(rows: list[Line], items: list[Line], width: int) -> list[Line]:
    """Put the legend right of the rows where there is room, else below."""
    widest = max((len("".join(text for text, _ in row).rstrip()) for row in rows), default=0)
    if len(items) <= len(rows) and widest + _LEGEND_GAP + max((_width(i) for i in items), default=0) <= width:
        beside = [*items, *[[]] * (len(rows) - len(items))]
        return [
            [*_cut(row, widest), (" " * (widest - _width(_cut(row, widest)) + _LEGEND_GAP), "label"), *item]
            if item
            else row
            for row, item in zip(rows, beside, strict=True)
        ]
    below: Line = []
    for item in items:
        below += [*item, ("   ", "label")]
    return [*rows, [], below]


class MachinePicture(Widget):
    """Shows the picture with its legend, as high as its width requires."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"machine--{part}" for part in (*CELLS, "label", "link")}
    DEFAULT_CSS = """
    MachinePicture {
        width: 100%;
        height: auto;
        & > .machine--target { color: $accent; text-style: bold; }
        & > .machine--draft { color: $limit; text-style: bold; }
        & > .machine--free { color: $hint; }
        & > .machine--off { color: $foreground 40%; }
        & > .machine--label { color: $hint; }
        & > .machine--link { color: $foreground 40%; }
    }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._topology: Topology | None = None
        self._use = Use()
        self._roomy_rows = ROOMY_ROWS
        self._rows: list[Strip] | None = None  # drawn, until the figures or the size change

    def set_roomy_rows(self, rows: int) -> None:
        if rows != self._roomy_rows:
            self._roomy_rows = rows
            self._redraw()
            self.refresh(layout=True)

    def show(self, topology: Topology | None, use: Use) -> None:
        if (topology, use) != (self._topology, self._use):
            higher = topology is not self._topology
            self._topology, self._use = topology, use
            self._redraw()
            if higher:
                self.refresh(layout=True)

    def _lines(self, width: int) -> list[Line]:
        if self._topology is None:
            return [[("Reading the machine…", "label")]]
        rows = picture(self._topology, self._use, width, self._roomy_rows)
        return with_legend(rows, legend(self._topology, self._use), width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines(width))

    def _redraw(self) -> None:
        self._rows = None
        self.refresh()

    def on_resize(self) -> None:
        self._rows = None

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._rows = None

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if self._rows is None:
            self._rows = [self._strip(line, width) for line in self._lines(width)]
        return self._rows[y] if y < len(self._rows) else Strip.blank(width, self.rich_style)

    def _strip(self, line: Line, width: int) -> Strip:
        segments = [Segment(text, self.get_component_rich_style(f"machine--{part}")) for text, part in line]
        return Strip(segments).adjust_cell_length(width, self.rich_style)
