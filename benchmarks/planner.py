"""The planner against measurements that others published: tok/s of decoding and prefill on machines that are not here.

    python benchmarks/planner.py [--quick]

"cpuchat" is what is planned, "baseline" what was measured (published.toml, with the source of each). Computes only: a
second, on any machine. Decoding is planned twice: with the share of the read bandwidth that comes with the program;
and, as that rests on some of the same measurements, with the median share of all *other* machines. The latter counts.
Points that set a constant of the program are shown and not counted, as are verify passes of a mixture of experts.
"""

from __future__ import annotations

import statistics
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from common import Row, Target, arguments, machine, report, run_main

from cpuchat.costs.model import CostProfile, bytes_read, pass_cost, prefill_cost
from cpuchat.costs.usual import Figure
from cpuchat.models.traffic import typical_work
from cpuchat.planner.plan import MachineSpec, PlannedModel
from cpuchat.protocol.model_info import ModelWork

FILE = Path(__file__).with_name("published.toml")
N_PAST = 64  # the middle of llama-bench's tg128
MEDIAN = 20.0  # % that the median error may have
# Pass over n tokens by one over a single token: DeepSeek-R1 on a NUMA machine (llama.cpp pull request 17034).
MIXTURE = {2: 1.21, 4: 1.66, 8: 2.65, 16: 4.46}


def decode_rate(profile: CostProfile, work: ModelWork, n_past: float) -> float:
    """Return tok/s of plain decoding with `n_past` tokens in the context."""
    return 1 / pass_cost(profile, work, 1, n_past).seconds


@dataclass(frozen=True)
class Point:
    """A published measurement in tok/s; `prefill` tokens of prompt, 0 for decoding."""

    machine: MachineSpec
    model: PlannedModel
    measured: float
    prefill: int
    engine: str
    constant: bool
    source: str

    @property
    def name(self) -> str:
        what = f"prefill {self.prefill}" if self.prefill else "decode"
        return f"{self.machine.name}: {self.model.name} {self.model.quantization} {what}"

    @property
    def share(self) -> float:
        """Of the read bandwidth, reached in decoding."""
        return self.measured * bytes_read(self.model.work, 1, N_PAST) / (self.machine.read_gbs.value * 1e9)

    def in_range(self) -> bool:
        """Return whether it was measured between the planned low and high."""
        low, high = (decode_rate(self.machine.profile(name, ()), self.model.work, N_PAST) for name in ("low", "high"))
        return low <= self.measured <= high

    def planned(self, share: float | None = None) -> float:
        where = self.machine
        if share is not None:
            where = msgspec.structs.replace(where, decode=Figure(share * where.read_gbs.value))
        if not self.prefill:
            return decode_rate(where.profile(own=()), self.model.work, N_PAST)
        profile = where.profile("high" if self.engine == "ik" else "low", ())
        return self.prefill / prefill_cost(profile, self.model.work, self.prefill).seconds


def read_points(content: dict[str, Any]) -> list[Point]:
    places = {table["id"]: msgspec.convert(table, MachineSpec) for table in content["machine"]}
    points: list[Point] = []
    for group in content["point"]:
        for name, quantization, size, measured in group["rows"]:
            about = content["model"][name]
            work = typical_work(
                1e9 * size,
                quantization,
                params=1e9 * about["params"],
                active=about.get("active", about["params"]) / about["params"],
                id=about["dims"],
            )
            model = PlannedModel(
                name=name,
                quantization=quantization,
                size=1e9 * size,
                work=work,
                kv_rows={one.window: one.nbytes for one in work.attention},
            )
            place, engine = places[group["machine"]], group.get("engine", "llama.cpp")
            prefill, constant = group.get("prefill", 0), group.get("constant", False)
            points.append(Point(place, model, measured, prefill, engine, constant, group["source"]))
    return points


def others_share(point: Point, points: list[Point]) -> float:
    """The median over machines of the shares that they reach in decoding, without the machine of `point`.

    Of machines of the same kind, if there is another one.
    """
    decoding = [one for one in points if not one.prefill and one.machine.id != point.machine.id]
    same = [one for one in decoding if one.machine.kind == point.machine.kind] or decoding
    by_machine: dict[str, list[float]] = {}
    for one in same:
        by_machine.setdefault(one.machine.id, []).append(one.share)
    return statistics.median(statistics.median(shares) for shares in by_machine.values())


def error(planned: float, measured: float) -> float:
    """In percent of what was measured."""
    return 100 * abs(planned / measured - 1)


def mixture_rows(points: list[Point]) -> list[Row]:
    """Verify passes of DeepSeek-R1: they set how much tokens of one text share experts."""
    model = next(one.model for one in points if one.model.name == "r1")
    one = bytes_read(model.work, 1)
    return [
        Row(f"R1: pass over {n} tokens by one", "×", [bytes_read(model.work, n) / one], [measured],
            note="sets a constant, not counted")
        for n, measured in MIXTURE.items()
    ]  # fmt: skip


def main() -> None:
    options = arguments(__doc__)
    points = read_points(tomllib.loads(FILE.read_text(encoding="utf-8")))
    rows: list[Row] = []
    counted: dict[str, list[float]] = {"shipped": [], "others": [], "decode": [], "prefill": []}
    for point in points:
        shipped = point.planned()
        fair = shipped if point.prefill else point.planned(others_share(point, points))
        mark = " (set a constant, not counted)" if point.constant else ""
        rows.append(Row(point.name + mark, "tok/s", [fair], [point.measured]))
        if not point.constant:
            counted["shipped"].append(error(shipped, point.measured))
            counted["others"].append(error(fair, point.measured))
            counted["prefill" if point.prefill else "decode"].append(error(fair, point.measured))
    places: dict[str, list[float]] = {}
    fair_errors = iter(counted["others"])
    for point in points:
        if not point.constant:
            places.setdefault(point.machine.id, []).append(next(fair_errors))
    medians = {name: statistics.median(errors) for name, errors in counted.items()}
    by_machine = statistics.median(statistics.median(errors) for errors in places.values())
    inside = [point.in_range() for point in points if not point.constant and not point.prefill]
    rows += mixture_rows(points)
    rows.append(Row("median error, shares of other machines", "%", [medians["others"]], target=Target(MEDIAN, False)))
    rows.append(Row("the same, median over machines", "%", [by_machine], target=Target(MEDIAN, False)))
    independent = [
        error(point.planned(None if point.prefill else others_share(point, points)), point.measured)
        for point in points
        if not point.constant and point.machine.read_gbs.basis != "computed"
    ]
    what = f"median error, without bandwidths derived from decoding (n = {len(independent)})"
    rows.append(Row(what, "%", [statistics.median(independent)], target=Target(MEDIAN, False)))
    rows.append(Row("median error, as shipped", "%", [medians["shipped"]]))
    rows.append(Row("decode within the planned range", "%", [100 * sum(inside) / len(inside)]))
    rows.append(Row("points counted", "", [len(counted["others"])], target=Target(20)))
    rows.append(Row("machines counted", "", [len(places)], target=Target(6)))
    worst = sorted(counted["others"])
    remarks = [
        f"decode {medians['decode']:.1f} % (n = {len(counted['decode'])}), prefill {medians['prefill']:.1f} % "
        f"(n = {len(counted['prefill'])}); 90 % of the points within {worst[round(0.9 * (len(worst) - 1))]:.0f} %",
        *dict.fromkeys(f"{point.machine.name}: {point.source}" for point in points),
    ]
    report("planner", machine(), rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
