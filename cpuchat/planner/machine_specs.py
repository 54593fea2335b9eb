"""Machines to plan for: figures with their sources, and the cost profiles that follow from them."""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path
from typing import Annotated

import msgspec

from cpuchat import paths, toml
from cpuchat.costmodel.profile import CostProfile, scaled
from cpuchat.costmodel.usual import Figure, Kind, Scenario, Text, int8_tops, usual, usual_profile
from cpuchat.errors import UsageError
from cpuchat.settings import explained

HERE = "this"
"""The name of the machine that cpuchat runs on."""
MAX_BYTES = 1 << 20
_FOLDER = Path(__file__).parent
_WORDS = re.compile(r"[a-z]+|\d+")
_NOT_IN_ID = re.compile(r"[^a-z0-9.+-]+")
_LARGE = 1e12  # bytes of weights that no cache holds
_MEASURED_MOST = 1.05  # of the theoretical bandwidth: data sheets round
_FITTED: dict[Scenario, float] = {"low": 0.87, "value": 1.0, "high": 1.15}
"""Speed against a profile fitted to a probe: of 15 models of 0.05B to 30B-A3B in Q4_K_M, Q8_0 and F16, 13 decoded
within this range (benchmarks/README.md, costs.py)."""


class MachineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine. Bandwidths in GB/s, memory in GB, of 1e9 bytes.

    `theoretical` is what the memory channels allow, `measured` what reading reaches, `decode` what decoding reaches;
    the latter two follow from the kind of machine where missing. `cpu` is a name in cpus.toml. Either `price_usd`, or
    `usd_per_hour`, or neither is known. Of the machine that cpuchat runs on, `free_gb` is what is available now, and
    `fitted` the profile that was measured, in place of one by these figures; passes of the draft model take
    `draft_factor` times as long as by it.
    """

    id: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.+-]*\Z", max_length=60)]
    name: Text
    kind: Kind = "server"
    cpu: Text
    sockets: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    cores: Figure
    clock_ghz: Figure
    memory_gb: Figure
    free_gb: Figure | None = None
    theoretical: Figure | None = None
    measured: Figure | None = None
    decode: Figure | None = None
    l3_mb: Figure | None = None
    watts: Figure | None = None
    price_usd: Figure | None = None
    usd_per_hour: Figure | None = None
    fitted: CostProfile | None = None
    draft_factor: float | None = None

    def __post_init__(self) -> None:
        if self.theoretical is None and self.measured is None:
            raise ValueError("measured: give the measured or the theoretical bandwidth")
        if self.cores.value < 1:
            raise ValueError("cores: a machine has at least 1")
        both = self.theoretical, self.measured
        if both[0] is not None and both[1] is not None and both[1].at("high") > _MEASURED_MOST * both[0].value:
            raise ValueError("measured: exceeds the theoretical bandwidth")
        most = both[0] or self.read_gbs
        if self.decode is not None and self.decode.at("high") > _MEASURED_MOST * most.at("high"):
            raise ValueError("decode: exceeds the bandwidth of the memory")
        if self.cpu not in usual().cpu:
            known = difflib.get_close_matches(self.cpu, usual().cpu, n=3, cutoff=0.3) or list(usual().cpu)
            raise ValueError(f"cpu: unknown {self.cpu!r}; known are {', '.join(known)}")

    @property
    def read_gbs(self) -> Figure:
        """Return the read bandwidth: measured, else what is typical of the theoretical one."""
        if self.measured is not None:
            return self.measured
        share, peak = usual().typical, self.theoretical
        assert peak is not None  # by __post_init__
        return Figure(share.value * peak.value, basis="estimate", source=f"80 % of {peak.value:g}: {share.source}")

    def decode_gbs(self, scenario: Scenario) -> float:
        """Return the bandwidth that decoding reaches."""
        if self.fitted is not None:
            return self.profile(scenario).read_rate(_LARGE) / 1e9
        if self.decode is not None:
            return self.decode.at(scenario)
        share = usual().decode[self.kind].at(scenario)
        return share * self.read_gbs.value

    @property
    def decode_source(self) -> str:
        if self.fitted is not None:
            return "fitted to passes that were measured here"
        if self.decode is not None:
            return self.decode.source
        share = usual().decode[self.kind]
        return f"{100 * share.at('low'):.0f} to {100 * share.at('high'):.0f} % of the read bandwidth: {share.source}"

    def int8_tops(self, scenario: Scenario) -> float:
        """Return tera-operations per second in products of quantized matrices, all cores together."""
        return int8_tops(self.cpu, self.cores.value, self.clock_ghz.value, sockets=self.sockets, scenario=scenario)

    def profile(self, scenario: Scenario = "value") -> CostProfile:
        """Return the cost profile, with everything at its `low`, its `value`, or its `high`."""
        if self.fitted is not None:
            return scaled(self.fitted, _FITTED[scenario])
        return usual_profile(
            self.cpu,
            self.cores.value,
            self.decode_gbs(scenario) * 1e9,
            clock_ghz=self.clock_ghz.value,
            l3_bytes=self.l3_mb.value * 1e6 if self.l3_mb is not None else 0.0,
            sockets=self.sockets,
            scenario=scenario,
        )


@functools.cache
def machines() -> tuple[MachineSpec, ...]:
    """Return the machines that come with the program."""
    tables = toml.loads((_FOLDER / "machines.toml").read_text(encoding="utf-8"))
    return tuple(msgspec.convert(table, MachineSpec) for table in tables["machine"])


def all_machines() -> tuple[list[MachineSpec], list[str]]:
    """Return the machines that come with the program and those in the config folder, which replace one of the same id;
    and a sentence for each file there that is not valid."""
    found = {one.id: one for one in machines()}
    problems: list[str] = []
    for file in sorted(paths.user_machines_dir().glob("*.toml")):
        try:
            one = read_machine(file)
            found[one.id] = one
        except UsageError as error:
            problems.append(error.message)
    return list(found.values()), problems


def find_machine(wanted: str) -> MachineSpec:
    """Return the machine with that id or name, or a part of it that only one has: of the program's or of the user's.

    Raises:
        UsageError: unknown or ambiguous; the hint names the nearest.
    """
    text = wanted.strip().lower()
    known, problems = all_machines()
    exact = [one for one in known if text in (one.id, one.name.lower())]
    words = _words(text)
    parts = exact or [one for one in known if words and words <= _words(f"{one.id} {one.name}")]
    if len(parts) == 1:
        return parts[0]
    names = [one.id for one in known]
    if parts:
        raise UsageError(f"{wanted} is ambiguous.", f"Use {' or '.join(one.id for one in parts)}.")
    near = difflib.get_close_matches(text, names, n=2, cutoff=0.4) or names
    hint = f"Did you mean {' or '.join(near)}?" if len(near) < 3 else f"Known are {', '.join(names)}."
    more = problems[0] if problems else "Describe another one in a file: --like FILE.toml; see --machines."
    raise UsageError(f"Unknown machine {wanted!r}.", f"{hint} {more}")


def with_costs(
    machine: MachineSpec, source: str, price_usd: float | None = None, watts: float | None = None
) -> MachineSpec:
    """Return the machine with what the user says that it costs, bought and not rented, and takes at the wall."""
    if price_usd is not None:
        price = Figure(price_usd, basis="given", source=source)
        machine = msgspec.structs.replace(machine, price_usd=price, usd_per_hour=None)
    if watts is not None:
        machine = msgspec.structs.replace(machine, watts=Figure(watts, basis="given", source=source))
    return machine


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORDS.findall(name.lower().replace("×", "x")))


def read_machine(file: Path) -> MachineSpec:
    """Read a machine of the user's from a TOML file.

    Raises:
        UsageError: the file cannot be read, or a figure is missing or impossible; the message names the key.
    """
    try:
        table = toml.loads(paths.read_text(file, MAX_BYTES))
    except OSError as error:
        raise UsageError(f"{paths.shown(file)} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"{paths.shown(file)} is not valid TOML: {error}.") from None
    table = {key: {"value": value} if key in _FIGURES and _is_number(value) else value for key, value in table.items()}
    for key in table.keys() & {"fitted", "draft_factor", "free_gb"}:
        raise UsageError(f"{paths.shown(file)}, {key}: only cpuchat writes this.", "Remove it.")
    table.setdefault("id", _NOT_IN_ID.sub("-", file.stem.lower()).strip("-.+") or "own")
    table.setdefault("name", file.stem)
    if table["id"] == HERE:
        raise UsageError(f"{paths.shown(file)}, id: {HERE} is the machine that cpuchat runs on.", "Choose another id.")
    try:
        return msgspec.convert(table, MachineSpec)
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        raise UsageError(
            f"{paths.shown(file)}{f', {key}' if key else ''}: {reason}.",
            "`cpuchat plan --machines --json` prints machines in this format.",
        ) from None


_FIGURES = frozenset(
    {"cores", "clock_ghz", "memory_gb", "theoretical", "measured", "decode", "l3_mb", "watts", "price_usd",
     "usd_per_hour"}
)  # fmt: skip


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
