"""Draws the machine: every core as a cell, by L3 group, NUMA node and socket; where there is room, its SMT siblings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.widgets import Static

from cpuchat.hardware.lists import format_cpu_list
from cpuchat.telemetry.units import gigabytes

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Core, Topology

Line = list[tuple[str, str]]
"""(text, part) in reading order; parts are the component classes of `MachinePicture` without their prefix."""

CELLS = {"target": "▣", "working": "■", "shared": "▨", "free": "□", "off": "·", "busy": "▩", "sibling": "▫"}
_BUSY = "busy with other programs"
NAMES = {
    "target": "for the model", "working": "of them computing", "shared": f"of them {_BUSY}", "free": "unused",
    "off": "not allowed", "busy": _BUSY,
}  # fmt: skip
ROOMY = 30
"""Rows of a terminal from which a blank one parts the legend from the picture."""
PARTS = (*CELLS, "label", "link")
_GAP, _FEW, _NUMBERED = 3, 2, 70
ROOMY_ROWS = 8
"""Maximum number of rows at which cells are drawn with siblings and gaps, unless told otherwise."""


@dataclass(frozen=True)
class Use:
    """Logical CPUs of the target, those that other programs keep busy, and those that compute for an answer."""

    target: Collection[int] = ()
    busy: Collection[int] = ()
    working: Collection[int] = ()

    def part(self, core: Core, allowed: Collection[int]) -> str:
        """Return what this core is for, a key of `NAMES`."""
        is_busy = not {*core.cpus}.isdisjoint(self.busy)
        if not {*core.cpus}.isdisjoint(self.target):
            return "shared" if is_busy else "target" if {*core.cpus}.isdisjoint(self.working) else "working"
        if is_busy:
            return "busy"
        return "free" if any(cpu in allowed for cpu in core.cpus) else "off"

    def cell(self, core: Core, allowed: Collection[int], smt: bool) -> Line:
        """Draw a core, with `smt` its further logical CPUs too."""
        part = self.part(core, allowed)
        n_used = max(len({*self.target}.intersection(core.cpus)), 1)
        is_allowed = not {*core.cpus}.isdisjoint(allowed)
        siblings = (len(core.cpus) - n_used) * CELLS["sibling"] if smt and is_allowed else ""
        return [(CELLS[part] * (n_used if smt else 1), part), (siblings, "sibling")]


def picture(topology: Topology, use: Use, width: int, max_rows: int = ROOMY_ROWS) -> list[Line]:
    """Draw the rows, at most `width` cells wide if that is 24 or more. Where they would be more than `max_rows` numbers
    of CPUs are left out, then siblings, then gaps."""
    blocks = _blocks(topology)
    gutter = max(len(name) for block in blocks for name in block.names) + _GAP if any(b.names for b in blocks) else 0
    rows: list[Line] = []
    details = [(" ", True, width >= _NUMBERED), (" ", True, False), (" ", False, False), ("", False, False)]
    for gap, smt, numbered in details if topology.smt else [details[0], *details[2:]]:
        rows = []
        groups = [[one.numbered() if numbered else one for one in block.groups] for block in blocks]
        label = max(len(one.name) for some in groups for one in some) + 2
        for index, (block, some) in enumerate(zip(blocks, groups, strict=True)):
            lines = _block_rows(some, label, topology, use, max(width - gutter, 12), gap, smt)
            lines += [[] for _ in range(len(block.names) - len(lines))]
            names = [*block.names, *[""] * (len(lines) - len(block.names))]
            if index and gutter and (len(lines) > 1 or block.opens_socket):
                rows.append([])
            rows += [[(name.ljust(gutter), "label"), *line] for name, line in zip(names, lines, strict=True)]
        if len(rows) <= max_rows:
            break
    return rows


def legend(topology: Topology, use: Use, rows: Sequence[Line], width: int) -> list[Line]:
    """Name the kinds of cells that occur in `rows`, with how many cores are of each, in lines that end between them."""
    found = Counter(use.part(core, topology.allowed) for core in topology.cores)
    found["target"] += found["shared"] + found["working"]
    entries = [(cell, part, f"{found[part]} {NAMES[part]}") for part, cell in CELLS.items() if found[part]]
    if any(part == "sibling" and text for row in rows for text, part in row):
        entries.append((CELLS["sibling"], "sibling", "SMT sibling, unused"))
    if any(len(link) > 1 for link in topology.fabric_links):
        entries.append(("──", "link", "shared fabric link"))
    lines: list[Line] = [[]]
    for cell, part, name in entries:
        if lines[-1] and _width(lines[-1]) + _GAP + len(f"{cell} {name}") > width:
            lines.append([])
        lines[-1] += [(" " * _GAP if lines[-1] else "", "label"), (f"{cell} ", part), (name, "label")]
    return lines


@dataclass(frozen=True)
class _Group:
    """Cores of one L3 group; `fabric_link` -1 if it shares none with another group."""

    name: str
    cores: tuple[Core, ...]
    fabric_link: int = -1

    def numbered(self) -> _Group:
        cpus = format_cpu_list([cpu for core in self.cores for cpu in core.cpus])
        return replace(self, name=f"{self.name} CPU {cpus}")


@dataclass(frozen=True)
class _Block:
    """The groups of one node of one socket, and the names left of them."""

    names: tuple[str, ...]
    groups: tuple[_Group, ...]
    opens_socket: bool


def _blocks(topology: Topology) -> list[_Block]:
    digits = len(str(max(len(topology.l3_groups) - 1, 0)))
    is_sized = len(topology.l3_groups) <= _FEW or len({group.size for group in topology.l3_groups}) > 1
    by_place: dict[tuple[int, int], list[_Group]] = {}
    for group in topology.l3_groups:
        is_linked = any(group.index in link and len(link) > 1 for link in topology.fabric_links)
        drawn = _Group(
            (f"L3 {group.index:>{digits}}" if len(topology.l3_groups) > 1 else "L3")
            + (f" {group.size >> 20:>2} MB" if is_sized and group.size else ""),
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
        memory = next((one.memory for one in topology.nodes if one.number == node), 0)
        held = f"{gigabytes(memory)} GB" if memory else "no memory"
        names = ([f"socket {package}"] if opens else []) + ([f"node {node} {held}"] if many_nodes else [])
        seen.add(package)
        blocks.append(_Block(tuple(names), tuple(groups), opens))
    return blocks


def _block_rows(
    groups: Sequence[_Group], label: int, topology: Topology, use: Use, room: int, gap: str, smt: bool
) -> list[Line]:
    """Draw the groups of a block in columns as wide as the widest; groups that share a fabric link stand together."""
    drawn: list[list[Line]] = []
    for group in groups:
        lines: list[Line] = [[]]
        for cell in _cells(group.cores, topology.allowed, use, smt):
            if lines[-1] and _width([*lines[-1], *cell]) > max(room - label - 2, 4):
                lines.append([])
            lines[-1] += [*cell, (gap, "label")]
        heads = [group.name, *[""] * (len(lines) - 1)]
        drawn.append([[(head.ljust(label), "label"), *line] for head, line in zip(heads, lines, strict=True)])
    widest = max(_width(line) for lines in drawn for line in lines)
    links = [group.fabric_link for group in groups]
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


def _cells(cores: Sequence[Core], allowed: Collection[int], use: Use, smt: bool) -> Iterator[Line]:
    """Yield a cell for each core; performance and efficiency cores apart, with a letter before."""
    for kind, letter in (("performance", "P "), ("", ""), ("efficient", "E ")):
        some = [core for core in cores if core.kind == kind]
        lead = f"{'  ' if kind == 'efficient' and len(some) < len(cores) else ''}{letter}"
        for number, core in enumerate(some):
            yield [("" if number else lead, "label"), *use.cell(core, allowed, smt)]


def _width(line: Line) -> int:
    return sum(len(text) for text, _ in line)


class MachinePicture(Static):
    """Shows the picture with its legend, as high as its width requires."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"machine--{part}" for part in PARTS}

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__("Reading the machine…", id=id)
        self._shown: tuple[Topology, Use, int, int] | None = None

    def show(self, topology: Topology, use: Use) -> None:
        """Draw this; nothing happens while it is shown already, in this width."""
        shown = (topology, use, self.size.width, self.app.size.height // 4)
        if shown == self._shown or not self.size.width:
            return
        self._shown = shown
        lines = picture(*shown)
        lines += [*([[]] if self.app.size.height >= ROOMY else []), *legend(topology, use, lines, self.size.width)]
        styles = {part: self.get_component_rich_style(f"machine--{part}", partial=True) for part in PARTS}
        self.update(Text("\n").join(Text.assemble(*((text, styles[part]) for text, part in line)) for line in lines))
