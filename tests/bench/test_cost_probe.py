"""The probe with a real worker: small models, real passes."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cpuchat.base import paths
from cpuchat.base.errors import Interrupted, MeasureFailed
from cpuchat.bench import cost_probe
from cpuchat.bench.cost_probe import Case, CostProbe, Pass, cases, probe_costs
from cpuchat.costs.fit import Observation
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.models.costs import CostLog
from cpuchat.models.quantize.types import quant_type
from cpuchat.models.synthetic import model
from cpuchat.models.synthetic.model import SHAPES, tensor_type
from cpuchat.protocol.messages import Failed, Measure, Measured
from tests.costs import made_up

SPEC = PlacementSpec(threads=1)
FEW = [
    Case("passes", SHAPES["tiny"], "Q8_0", (Pass(1), Pass(8)), 0.5),
    Case("Q4_K", SHAPES["tiny"], "Q4_K", (Pass(1, 64), Pass(4, 64)), 0.5),
]


def left() -> list[Path]:
    return list(paths.cache_dir().glob("probe.*"))


async def test_passes_are_measured_and_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_probe, "cases", lambda: FEW)
    monkeypatch.setattr(cost_probe, "is_disturbed", lambda found: False)  # whatever else runs
    told: list[str] = []
    placement = place(read_topology(), SPEC)
    probe = CostProbe(SPEC, lambda done, of, what: told.append(what))
    assert await probe_costs(probe, placement) == 4
    assert told == ["passes", "Q4_K"]
    seen = CostLog(placement.cpus, placement.memory_policy.words).probe.value
    assert [(one.n_tokens, one.n_past) for one in seen] == [(1, 4), (8, 0), (1, 68), (4, 64)]
    assert all(one.seconds > 0 for one in seen)
    assert "Q4_K" in {part.type for part in seen[2].work.dense}
    assert not left()


class Made(CostProbe):
    """Has measured."""

    async def run(self, budget: float = 0.0) -> list[Observation]:
        return made_up.probe(made_up.two_cores())[:12]


async def test_passes_are_not_saved_beside_other_programs_nor_for_a_replaced_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placement = place(read_topology(), SPEC)
    with monkeypatch.context() as disturbed:
        disturbed.setattr(cost_probe, "is_disturbed", lambda found: True)
        assert await probe_costs(Made(SPEC), placement) == 0
    with monkeypatch.context() as updated:
        updated.setattr(cost_probe, "engine_replaced", lambda: True)
        with pytest.raises(MeasureFailed, match="Restart cpuchat"):
            await probe_costs(Made(SPEC), placement)
    assert not CostLog(placement.cpus, placement.memory_policy.words).probe


@pytest.mark.parametrize("when", ["writing", "measuring"])
async def test_a_probe_stops_at_once_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A large file is not written to its end, and a long measurement is not waited for."""
    loop, probe, rows = asyncio.get_running_loop(), CostProbe(SPEC), model.random_rows
    written: list[int] = []

    def stopped_at_the_first(kind: str, rng: np.random.Generator, n: int, std: float) -> np.ndarray[Any, Any]:
        if not written:
            loop.call_soon_threadsafe(probe.stop)
            while not probe._stopped:
                pass
        written.append(n)
        return rows(kind, rng, n, std)

    endless = msgspec.structs.replace(SHAPES["0.05b"], n_layer=12)
    if when == "writing":
        endless = SHAPES["8b"]
        monkeypatch.setattr(model, "random_rows", stopped_at_the_first)
    else:
        measure = probe._backend.measure

        async def stopped(command: Measure) -> Measured | Failed:
            loop.call_soon(probe.stop)
            return await measure(command)

        monkeypatch.setattr(probe._backend, "measure", stopped)
    monkeypatch.setattr(cost_probe, "cases", lambda: [Case("x", endless, "F16", (Pass(512),) * 1000, 1.0)])
    with pytest.raises(Interrupted):
        await probe.run(budget=600)
    assert len(written) == (when == "writing")
    assert not left()


async def test_beside_an_app_a_probe_gives_way_and_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_probe, "cases", lambda: FEW)
    placement, measured = place(read_topology(), SPEC), list[str]()
    log = CostLog(placement.cpus, placement.memory_policy.words)
    for disturbed in ("passes", "Q4_K", ""):
        monkeypatch.setattr(cost_probe, "is_disturbed", lambda found, what=disturbed: measured[-1] == what)
        probe = CostProbe(SPEC, lambda done, of, what: measured.append(what), beside=log)
        found = await probe.run(budget=600)  # nothing is left out for lack of time
        assert bool(found) == (not disturbed) and log.probe is None
        assert ("part of a probe" in log.costs(made_up.two_cores()).source) == bool(log.part)
    assert measured == ["passes", "passes", "Q4_K", "Q4_K"] and len(found) == 4
    assert await probe_costs(CostProbe(SPEC, beside=log), placement) == 4
    assert log.probe is not None and not log.part


async def test_long_passes_are_left_out_on_slow_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(step=10.0)
    monkeypatch.setattr(cost_probe, "monotonic", lambda: next(ticks))
    case = Case("slow", SHAPES["tiny"], "Q8_0", (Pass(256), Pass(1), Pass(8)), 1.0)
    monkeypatch.setattr(cost_probe, "cases", lambda: [case])
    assert [one.n_tokens for one in await CostProbe(SPEC).run(budget=15)] == [1, 8]


def test_every_type_of_usual_files_is_measured() -> None:
    measured = {case.quantization for case in cases()}
    for shape in ("0.5b", "1.5b", "8b", "30b-a3b"):
        n_embd, n_ff = SHAPES[shape].n_embd, SHAPES[shape].n_ff
        names = [("token_embd.weight", n_embd), ("blk.0.ffn_down.weight", n_ff), ("blk.0.attn_q.weight", n_embd)]
        for quantization in ("Q4_K_M", "Q4_K_S", "Q8_0", "F16", "Q6_K"):
            assert {tensor_type(SHAPES[shape], quantization, *name) for name in names} <= measured
    assert {quant_type(name).tensor for name in ("Q4_K_M", "Q5_K_S", "IQ4_XS", "MXFP4", "Q3_K_M")} <= measured
    assert all({one.n for one in case.passes} >= {*made_up.KNOTS} for case in cases() if case.what != "attention")
    assert sum(case.share for case in cases()) <= 1.0


async def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(file: Path, *_: Any, **__: Any) -> Path:
        file.write_bytes(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cost_probe, "write_model", written)
    with pytest.raises(MeasureFailed, match="No space left"):
        await CostProbe(SPEC).run(budget=2)
    assert not left()


async def test_models_of_a_killed_probe_are_deleted_after_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_probe, "cases", lambda: [])
    old, new = paths.cache_dir() / "probe.old", paths.cache_dir() / "probe.new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "memory.gguf").write_bytes(b"some")
    os.utime(old, (1.0, 1.0))
    await CostProbe(SPEC).run()
    assert left() == [new]
