"""Everything that shows the read bandwidth, or what follows from it, shows the same of one state of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from cpuchat.bench.why import gather
from cpuchat.config.settings import Settings
from cpuchat.hardware.diagnostics import gather_facts
from cpuchat.hardware.machine import MachineReader
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.measure.peak import ReadBandwidth, keep, known_of, with_peak
from cpuchat.models.catalog import estimates, load_catalog
from cpuchat.models.costs import CostLog
from cpuchat.models.library import usage
from cpuchat.models.machine import reach_of, this_machine
from cpuchat.models.prediction import estimate
from cpuchat.planner.plan import ThisMachine
from cpuchat.present.answers import roofline_json
from cpuchat.present.machine import Now, page_json, rows
from cpuchat.present.models import doubt, verdict
from cpuchat.protocol.messages import GenerationFinished, ModelLoaded
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.telemetry.meter import Meter
from cpuchat.telemetry.roofline import after_answer
from cpuchat.telemetry.units import gigabytes
from tests.costs.made_up import probe, two_cores
from tests.hardware.counters.simulated import Simulated
from tests.models.library.test_usage import answer, info
from tests.support.costs import work_of_size

pytestmark = pytest.mark.slow

PLACED = place(read_topology(), PlacementSpec())
CPUS, POLICY = PLACED.cpus, PLACED.memory_policy.words


def peaks(model: ModelInfo, timings: Timings) -> dict[str, float | None]:
    """Return the peak as every view has it: of the panel, a summary, F12, doctor, why, a list, a plan. Limits have none
    of an estimate."""
    loaded = with_peak(model, POLICY)
    meter = Meter()
    meter.observe(ModelLoaded(model=loaded), 0.0)
    meter.predicted(reach_of(model, POLICY))
    meter.observe(GenerationFinished(request_id=1, stop_reason="end", timings=timings), 9.0)
    panel = meter.figures().roofline
    summary = roofline_json(after_answer(loaded, timings, reach_of(model, POLICY)))
    screen = MachineReader(known=known_of).facts()
    doctor = gather_facts(kernel=Simulated().calls, refused=lambda _: "", known=known_of)
    engine = EngineInfo(version="1", pid=os.getpid(), memory_policy=POLICY)
    machine = this_machine(Settings())
    page = page_json(doctor, [])
    found = {
        "panel": panel.peak.value.bytes_per_s if panel.peak.value is not None else None,
        "summary": summary["peak"],
        "F12": screen.peaks.all_cores.bytes_per_s if screen.peaks.all_cores is not None else None,
        "doctor": page["peak_read"] or page["peak_estimated"],
        "why": gather(Settings(), model, engine, timings).model.peak_read or None,
        "list": machine.peak or None,
    }
    found["plan"] = round(1e9 * ThisMachine(Settings()).of().read_gbs.value, 3)
    shown = dict(rows(screen, Now()))["read bandwidth"]
    assert gigabytes(machine.peak) in shown and ("at least" in shown) == machine.at_least
    assert (f"≈{gigabytes(machine.peak)}" in shown) == machine.estimated
    assert machine.peak_source == page["peak_source"]
    assert (page["peak_read"] is None) == machine.estimated
    if not machine.estimated:
        assert summary["peak_source"] == machine.peak_source
        # The limit, utilization and what is predicted follow from it.
        assert panel.ceiling_plain.value == summary["ceilings"]["no_draft"]
        assert panel.ceiling_plain.value is not None and model.work is not None and machine.profile is not None
        own = machine.profile.read_rate(model.work.weight_bytes) / machine.factor_of(Path(model.path))
        fastest = max(machine.peak, machine.probed * own)
        assert panel.ceiling_plain.value == pytest.approx(fastest / model.work.weight_bytes)
        assert panel.utilization.value == summary["utilization"]
        assert panel.utilization.value == pytest.approx(summary["bandwidth"] / machine.peak)
        predicted = estimate(int(model.work.weight_bytes), machine).tok_s
        assert predicted is not None and predicted <= 1.001 * panel.ceiling_plain.value
    return found


@pytest.mark.parametrize("probed", [False, True])
def test_all_views_of_one_state_have_the_same_peak(tmp_path: Path, probed: bool) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    model = info(path, cpus=CPUS, peak_read=0.0, work=work_of_size(2e9), fingerprint="f" * 32)
    timings = answer(15.0)
    found = peaks(model, timings)
    assert not any(found.pop(name) for name in ("panel", "summary", "why"))
    (known,) = {round(one or 0.0) for one in found.values()}
    machine, catalog = this_machine(Settings()), load_catalog().models
    predicted = estimate(10**9, machine)
    assert known and predicted.tok_s and "±50 % until measured" in predicted.basis and "±50 %" in doubt(machine)
    assert {verdict(one) for one in estimates(catalog, machine).values() if not one.tok_s} <= {"too large", "no SIMD"}
    for rate, share in ((35e9, 0.5), (40e9, 1.0)):
        keep(ReadBandwidth(CPUS, rate, (rate,), (share,)), POLICY)
        if probed:
            CostLog(CPUS, POLICY).probed(probe(two_cores())[:12])
        assert {*peaks(model, timings).values()} == {rate}
    faster = msgspec.structs.replace(timings, predicted_ms=1e3 * 100 / 25.0)  # 50 GB/s
    assert usage.answered(model, faster, POLICY) and not usage.answered(model, faster, POLICY)
    found = peaks(model, faster)
    assert "±" not in estimate(10**9, this_machine(Settings())).basis
    assert {round(one or 0.0) for one in found.values()} == {50_000_000_000}, found
