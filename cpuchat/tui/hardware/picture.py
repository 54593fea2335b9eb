"""Draws the machine: every core as a cell, by L3 group, NUMA node and socket."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.widgets import Static

from cpuchat.telemetry.units import plural

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Core, Topology

Line = list[tuple[str, str]]
"""(text, part) in reading order; parts are the component classes of `MachinePicture` without their prefix."""

CELLS = {"target": "▣", "free": "□", "off": "·"}
NAMES = {"target": "for the model", "free": "free", "off": "unavailable"}
_GAP = 3
ROOMY_ROWS = 8
"""Maximum number of rows at which cells are drawn with gaps."""


@dataclass(frozen=True)
class Use:
    """Logical CPUs of the target."""

    target: Collection[int] = ()

    def part(self, core: Core, allowed: Collection[int]) -> str:
        """Return what this core does, a key of `CELLS`."""
        if not {*core.cpus}.isdisjoint(self.target):
            return "target"
        return "free" if any(cpu in allowed for cpu in core.cpus) else "off"


def picture(topology: Topology, use: Use, width: int) -> list[Line]:
    """Draw the rows, at most `width` cells wide if that is 24 or more.

    Where cells drawn apart would take more than `ROOMY_ROWS` rows they stand close together.
    """
    blocks = _blocks(topology)
    gutter = max(len(name) for block in blocks for name in block.names) + _GAP if any(b.names for b in blocks) else 0
    rows: list[Line] = []
    for gap in (" ", ""):
        rows = []
        for index, block in enumerate(blocks):
            lines = _block_rows(block, topology, use, max(width - gutter, 12), gap)
            lines += [[] for _ in range(len(block.names) - len(lines))]
            names = [*block.names, *[""] * (len(lines) - len(block.names))]
            if index and gutter and (len(lines) > 1 or block.opens_socket):
                rows.append([])
            rows += [[(name.ljust(gutter), "label"), *line] for name, line in zip(names, lines, strict=True)]
        if len(rows) <= ROOMY_ROWS:
            break
    return rows


def legend(topology: Topology, use: Use) -> Line:
    """Name the kinds of cells that occur, with how many cores are of each."""
    found = Counter(use.part(core, topology.allowed) for core in topology.cores)
    line: Line = []
    for part, cell in CELLS.items():
        line += (
            [(f"{cell} ", part), (f"{plural(found[part], 'core')} {NAMES[part]}   ", "label")] if found[part] else []
        )
    is_linked = any(len(link) > 1 for link in topology.fabric_links)
    return [*line, ("── ", "link"), ("shared fabric link", "label")] if is_linked else line


@dataclass(frozen=True)
class _Group:
    """Cores of one L3 group; `fabric_link` -1 if it shares none with another group."""

    name: str
    cores: tuple[Core, ...]
    fabric_link: int = -1


@dataclass(frozen=True)
class _Block:
    """The groups of one node of one socket, and the names left of them."""

    names: tuple[str, ...]
    groups: tuple[_Group, ...]
    opens_socket: bool


def _blocks(topology: Topology) -> list[_Block]:
    digits = len(str(max(len(topology.l3_groups) - 1, 0)))
    by_place: dict[tuple[int, int], list[_Group]] = {}
    for group in topology.l3_groups:
        is_linked = any(group.index in link and len(link) > 1 for link in topology.fabric_links)
        drawn = _Group(
            f"L3 {group.index:>{digits}}",
            tuple(topology.cores[index] for index in group.cores),
            group.fabric_link if is_linked else -1,
        )
        by_place.setdefault((group.package, group.node), []).append(drawn)
    # Cores without a known L3 cache: a machine that does not tell, or efficiency cores that have none.
    grouped = {index for group in topology.l3_groups for index in group.cores}
    rest = [core for core in topology.cores if core.index not in grouped]
    for place in {(core.package, core.node) for core in rest}:
        cores = tuple(core for core in rest if (core.package, core.node) == place)
        by_place.setdefault(place, []).append(_Group("no L3" if topology.l3_groups else "cores", cores))
    many_sockets, many_nodes = len(topology.packages) > 1, len({n.number for n in topology.nodes if n.cpus}) > 1
    blocks: list[_Block] = []
    seen: set[int] = set()
    for (package, node), groups in sorted(by_place.items()):
        opens = many_sockets and package not in seen
        names = ([f"socket {package}"] if opens else []) + ([f"node {node}"] if many_nodes else [])
        seen.add(package)
        blocks.append(_Block(tuple(names), tuple(groups), opens))
    return blocks


def _block_rows(block: _Block, topology: Topology, use: Use, room: int, gap: str) -> list[Line]:
    """Draw the groups of a block in columns as wide as the widest; groups that share a fabric link stand together."""
    label = max(len(group.name) for group in block.groups) + 2
    drawn: list[list[Line]] = []
    for group in block.groups:
        lines: list[Line] = [[]]
        for cell in _cells(group.cores, topology.allowed, use, gap):
            if lines[-1] and _width(lines[-1]) + len(cell[0].rstrip()) > max(room - label - 2, 4):
                lines.append([])
            lines[-1].append(cell)
        heads = [group.name, *[""] * (len(lines) - 1)]
        drawn.append([[(head.ljust(label), "label"), *line] for head, line in zip(heads, lines, strict=True)])
    widest = max(_width(line) for lines in drawn for line in lines)
    links = [group.fabric_link for group in block.groups]
    linked = max((links.count(link) for link in links if link >= 0), default=1)
    fit = max((room + _GAP) // (widest + _GAP) // linked * linked, 1)
    columns = math.ceil(len(drawn) / math.ceil(len(drawn) / fit))
    columns = min(math.ceil(columns / linked) * linked, fit)
    rows: list[Line] = []
    for start in range(0, len(drawn), columns):
        some = drawn[start : start + columns]
        for y in range(max(map(len, some))):
            row: Line = []
            for x, lines in enumerate(some, start):
                line = lines[y] if y < len(lines) else []
                row += [*line, (" " * (widest - _width(line)), "label")]
                if x + 1 < start + len(some):
                    is_one = y == 0 and links[x] >= 0 and links[x] == links[x + 1]
                    row.append(("── " if is_one and gap else " ─ " if is_one else " " * _GAP, "link"))
            rows.append(row)
    return rows


def _cells(cores: Sequence[Core], allowed: Collection[int], use: Use, gap: str) -> Iterator[tuple[str, str]]:
    """Yield a cell for each core; performance and efficiency cores apart, with a letter before."""
    for kind, letter in (("performance", "P "), ("", ""), ("efficient", "E ")):
        some = [core for core in cores if core.kind == kind]
        if some and letter:
            yield f"{'  ' if kind == 'efficient' and len(some) < len(cores) else ''}{letter}", "label"
        for core in some:
            part = use.part(core, allowed)
            yield CELLS[part] + gap, part


def _width(line: Line) -> int:
    return sum(len(text) for text, _ in line)


class MachinePicture(Static):
    """Shows the picture with its legend, as high as its width requires."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"machine--{part}" for part in (*CELLS, "label", "link")}

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__("Reading the machine…", id=id)
        self._shown: tuple[Topology, Use, int] | None = None

    def show(self, topology: Topology, use: Use) -> None:
        """Draw this; nothing happens while it is shown already, in this width."""
        shown = (topology, use, self.size.width)
        if shown == self._shown or not self.size.width:
            return
        self._shown = shown
        lines = [*picture(*shown), [], legend(topology, use)]
        parts = (*CELLS, "label", "link")
        styles = {part: self.get_component_rich_style(f"machine--{part}", partial=True) for part in parts}
        self.update(Text("\n").join(Text.assemble(*((text, styles[part]) for text, part in line)) for line in lines))
