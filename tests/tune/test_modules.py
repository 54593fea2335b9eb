"""Tests timing CPU modules: what a search found is kept, and the whole probe with the engine that is installed."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.base.errors import Interrupted, UsageError
from cpuchat.models.cpu_modules import AUTO, TimedModules
from cpuchat.tune import modules
from cpuchat.tune.halving import HalvingResult, Ratio, Verdict
from cpuchat.tune.modules import ModuleProbe, timed
from tests.support.cores import ON_ONE_CPU

RATIO = Ratio(overall=1.08, decode=1.1, prefill=1.05)


@pytest.mark.parametrize(
    ("verdict", "module"), [("faster", "icelake"), ("mixed", AUTO), ("no gain", AUTO), ("slower", AUTO)]
)
def test_only_a_significantly_faster_module_replaces_the_usual_one(verdict: Verdict, module: str) -> None:
    found = timed("zen4", ["icelake", "haswell"], HalvingResult(verdict=verdict, best="icelake", ratio=RATIO))
    assert found == TimedModules(
        module=module, usual="zen4", of=("zen4", "icelake", "haswell"), rival="icelake",
        decode=pytest.approx(0.1), prefill=pytest.approx(0.05),
    )  # fmt: skip


@pytest.mark.parametrize("verdict", ["busy", "failed"])
def test_what_was_disturbed_decides_nothing(verdict: Verdict) -> None:
    assert timed("zen4", ["icelake"], HalvingResult(verdict=verdict, best="icelake", ratio=RATIO)) is None


@pytest.mark.slow
async def test_a_probe_runs_each_module_in_a_worker_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine built for one CPU ignores the names, which makes both workers the same."""
    small = msgspec.structs.replace(modules.LAYERS, n_embd=256, n_ff=512, n_head=4)
    monkeypatch.setattr(modules, "LAYERS", small)
    names = ("haswell", "x64")
    found = await ModuleProbe("Q4_K", ON_ONE_CPU, names).run()
    assert found is None or (found.of == names and found.module in (AUTO, "x64"))


async def test_types_without_synthetic_weights_are_refused_and_a_stopped_probe_ends() -> None:
    with pytest.raises(UsageError):
        await ModuleProbe("IQ2_XXS", ON_ONE_CPU, ("haswell", "x64")).run()
    probe = ModuleProbe("Q4_K", ON_ONE_CPU, ("haswell", "x64"))
    probe.stop()
    with pytest.raises(Interrupted):
        await probe.run()
