"""What was measured on this machine, as the app keeps it, makes its profile."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat import paths
from cpuchat.costmodel.passes import decode_rate, pass_cost
from cpuchat.engine.drafting.cached_costs import save_costs
from cpuchat.models.fingerprint import file_fingerprint
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.library import Library
from cpuchat.models.library.usage import UsageLog
from cpuchat.models.work import model_work
from cpuchat.planner.machine_specs import Figure, MachineSpec
from cpuchat.planner.measured import fitted_here, observations
from cpuchat.speculation.depth.costs import PassCosts
from cpuchat.synthetic.model import write_model
from tests.costmodel.made_up import two_cores, work


@pytest.fixture
def library(tmp_path: Path) -> Library:
    write_model(tmp_path / "small.gguf", "0.05b", "Q8_0")
    return Library([tmp_path], cache=tmp_path / "no-hub")


def usual() -> MachineSpec:
    return MachineSpec(
        id="x", name="x", kind="here", cpu="zen4", cores=Figure(2), clock_ghz=Figure(3), memory_gb=Figure(24),
        measured=Figure(60),
    )  # fmt: skip


def observed(library: Library) -> list[float]:
    return [one.n_tokens for one in observations(library.local_models(), UsageLog().read()) if "small" in one.model]


def test_nothing_measured_gives_nothing(library: Library) -> None:
    assert observed(library) == []


def test_calibrated_passes_teach_the_profile(library: Library, tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    model, true = model_work(read_model(file)), two_cores()
    passes = tuple(1e3 * pass_cost(true, model, n, 256).seconds for n in range(1, 33))
    save_costs(paths.calibration_file(), "a" * 64, PassCosts(passes, draft_ms=0.0), file_fingerprint(file), "")
    assert observed(library) == [1, 2, 4, 5, 8, 12, 16, 32]
    seen = [one for one in observations(library.local_models(), UsageLog().read()) if "small" in one.model]
    found = fitted_here(usual().profile(), seen)
    (factor,) = found.factors.values()
    for n in (1, 8, 32):
        now, truth = (pass_cost(one, model, n, 256).seconds for one in (found.profile, true))
        assert factor * now == pytest.approx(truth, rel=0.1)
    assert found.error < 0.05


def test_a_fitted_machine_plans_by_its_profile() -> None:
    machine = msgspec.structs.replace(usual(), fitted=two_cores())
    model = work("8b", "Q4_K_M")
    low, value, high = (decode_rate(machine.profile(name), model) for name in ("low", "value", "high"))
    assert low < value < high
    assert value == pytest.approx(decode_rate(two_cores(), model))
    assert machine.decode_gbs("value") == pytest.approx(42)
