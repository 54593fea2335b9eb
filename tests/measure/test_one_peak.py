"""Everything that shows a figure of this machine or of a model on it shows the same of one state, as text too."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import msgspec
import pytest

from cpuchat.bench.why import gather
from cpuchat.config import settings
from cpuchat.config.settings import Settings
from cpuchat.costs.model import ALIKE
from cpuchat.hardware.diagnostics import gather_facts
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.measure.peak import ReadBandwidth, keep, known_of, with_peak
from cpuchat.models.catalog import estimates, load_catalog
from cpuchat.models.costs import CostLog
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library import usage
from cpuchat.models.machine import reach_of, this_machine
from cpuchat.models.prediction import estimate
from cpuchat.models.synthetic.model import write_model
from cpuchat.models.traffic import model_work
from cpuchat.planner.plan import ThisMachine
from cpuchat.present.answers import roofline_json
from cpuchat.present.machine import page_json, read_bandwidth
from cpuchat.present.models import doubt, verdict
from cpuchat.protocol.messages import GenerationFinished, ModelLoaded
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.telemetry.meter import Meter
from cpuchat.telemetry.roofline import after_answer
from cpuchat.telemetry.units import bandwidth
from cpuchat.tui.chat.telemetry import TelemetryPanel
from cpuchat.tui.hardware.screen import HardwareScreen, MachineReader
from tests.cli.program import run
from tests.costs.made_up import probe, two_cores
from tests.hardware.counters.simulated import Simulated
from tests.models.library.test_usage import answer, info
from tests.support.chat_app import RunningApp, running
from tests.support.costs import work_of_size
from tests.support.machines import OnMachine
from tests.support.models_screen import about, opened
from tests.support.scripted_backend import answer as said

pytestmark = pytest.mark.slow

PLACED = place(read_topology(), PlacementSpec())
CPUS, POLICY = PLACED.cpus, PLACED.memory_policy.words


def peaks(model: ModelInfo, timings: Timings) -> dict[str, float | None]:
    """Return the peak as every view has it: of the panel, a summary, F12, doctor, why, a list, a plan."""
    loaded = with_peak(model, POLICY)
    meter = Meter()
    meter.observe(ModelLoaded(model=loaded), 0.0)
    meter.reach = reach_of(model, POLICY)
    meter.observe(GenerationFinished(request_id=1, stop_reason="end", timings=timings), 9.0)
    panel = meter.figures().roofline
    summary = roofline_json(after_answer(loaded, timings, reach_of(model, POLICY)))
    screen = MachineReader().facts(PlacementSpec())
    doctor = gather_facts(kernel=Simulated().calls, refused=lambda _: "", known=known_of)
    engine = EngineInfo(version="1", pid=os.getpid(), memory_policy=POLICY)
    machine = this_machine(Settings())
    page = page_json(doctor, [])
    found = {
        "panel": panel.peak.value and panel.peak.value.bytes_per_s,
        "summary": summary["peak"],
        "F12": screen.peaks.all_cores.bytes_per_s if screen.peaks.all_cores is not None else None,
        "doctor": page["peak_read"] or page["peak_estimated"],
        "why": gather(Settings(), model, engine, timings).model.peak_read,
        "list": machine.peak,
    }
    found["plan"] = round(1e9 * ThisMachine(Settings()).of().read_gbs.value, 3)
    shown = read_bandwidth(screen)
    assert bandwidth(machine.peak) in shown and (machine.estimated or ("at least" in shown) == machine.at_least)
    assert (f"≈{bandwidth(machine.peak)}" in shown) == machine.estimated
    assert machine.peak_source == page["peak_source"]
    assert (page["peak_read"] is None) == machine.estimated
    # The limit, utilization and what is predicted follow from it.
    assert summary["peak_source"] == machine.peak_source
    assert panel.ceiling_plain.value == summary["ceilings"]["no_draft"]
    assert panel.ceiling_plain.value is not None and model.work is not None and machine.profile is not None
    own = machine.profile.read_rate(model.work.weight_bytes) / machine.factor_of(Path(model.path))
    fastest = max(machine.peak, machine.probed * own)
    assert panel.ceiling_plain.value == pytest.approx(fastest / model.work.weight_bytes)
    assert panel.utilization.value == summary["utilization"]
    assert panel.utilization.value == pytest.approx(summary["bandwidth"] / machine.peak)
    assert estimate(int(model.work.weight_bytes), machine).tok_s <= 1.001 * panel.ceiling_plain.value
    assert not (machine.estimated and panel.limit)  # nothing is said to be the limit
    return found


@pytest.mark.parametrize("probed", [False, True])
def test_all_views_of_one_state_have_the_same_peak(tmp_path: Path, probed: bool) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    model = info(path, cpus=CPUS, peak_read=0.0, work=work_of_size(2e9), fingerprint="f" * 32)
    timings = answer(15.0)
    keep(ReadBandwidth(CPUS, 5e9, (5e9,), (0.5,)), POLICY)  # beside other programs: less than such cores usually read
    (known,) = {round(one or 0.0) for one in peaks(model, answer(6.0)).values()}
    machine, catalog = this_machine(Settings()), load_catalog().models
    predicted = estimate(10**9, machine)
    assert known > 5e9 and predicted.tok_s and "up to 2× off, at least 5.0 GB/s" in predicted.basis
    assert machine.estimated and "up to 2× off" in doubt(machine)
    assert {verdict(one) for one in estimates(catalog, machine).values() if not one.tok_s} <= {"too large", "no SIMD"}
    for rate, share in ((95e9, 0.5), (100e9, 1.0)):
        keep(ReadBandwidth(CPUS, rate, (rate,), (share,)), POLICY)
        if probed:
            CostLog(CPUS, POLICY).probed(probe(two_cores())[:12])
        assert {*peaks(model, timings).values()} == {rate}
    faster = msgspec.structs.replace(timings, predicted_ms=1e3 * 100 / 62.5)  # 125 GB/s
    assert usage.answered(model, faster, POLICY) and not usage.answered(model, faster, POLICY)
    found = peaks(model, faster)
    assert "off" not in estimate(10**9, this_machine(Settings())).basis
    assert {round(one or 0.0) for one in found.values()} == {125_000_000_000}, found


def on_one_line(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


async def screens(app: RunningApp) -> dict[str, str]:
    """Return the text of F12, and of the list of models with the details of the only one."""
    await app.press("f12")
    screen = app.app.screen
    assert isinstance(screen, HardwareScreen)
    await app.until(lambda: screen.now.here and screen.now.placed and "in use, CPUs" in app.screen_text)
    found = {"F12": on_one_line(app.screen_text)}
    await app.press("escape")
    await app.closes()
    await opened(app)
    await app.until(lambda: "GB free" in about(app))
    found |= {"models": on_one_line(app.screen_text), "details": about(app)}
    await app.press("escape")
    await app.closes()
    return found


async def panels(app: RunningApp) -> dict[str, str]:
    """Return the text of the panel, in brief and with all figures."""
    panel, found = app.chat.query_one(TelemetryPanel), dict[str, str]()
    for name in ("panel", "all figures"):
        found[name] = on_one_line("\n".join(panel.render_line(y).text for y in range(panel.size.height)))
        app.chat.action_telemetry()
        await app.pilot.pause()
    return found


def commands(file: Path) -> dict[str, str]:
    """Return what the command line prints."""
    of_model = {"plan": ("plan", str(file)), "show": ("models", "show", str(file))}
    return {
        name: on_one_line(run(*arguments).stdout)
        for name, arguments in ({"doctor": ("doctor",), "list": ("models", "list")} | of_model).items()
    }


PER_TOKEN, NEEDED = r"÷ ([\d.,]+ [kMG]B) per token", r"([\d.]+) of [\d.]+ GB free"
LIMIT, IN_USE = r"(\d[\d.,]*\d) tok/s without drafts", r"(\d+) of \d+ cores? in use, CPUs ([\d,-]+)"
SHOWN = {
    "read bandwidth": {
        "F12": r"all \d+ cores +(\d[\d.,]*\d) GB/s", "doctor": r" bandwidth .*?(\d[\d.,]*\d) GB/s",
        "why": r"Bandwidth: (\d[\d.,]*\d) GB/s", "plan": r"GB/s of (\d[\d.,]*\d) ÷",
        "all figures": r" of (\d[\d.,]*\d) GB/s",
    },
    "limit": {
        "F12": LIMIT, "doctor": LIMIT, "show": LIMIT, "plan": r"reading ≤ (\d[\d.,]*\d)",
        "all figures": r"limit (\d[\d.,]*\d) tok/s", "panel": r"(\d[\d.,]*\d) limit",
    },
    "predicted": {"show": r"speed ≈(\d[\d.,]*\d) tok/s:", "plan": r" tok/s (\d[\d.,]*\d) \("},
    "listed": {"list": r"(?:fits|tight) (≈?\d[\d.,]*\d)", "models": r"(≈?\d[\d.,]*\d) tok/s",
               "details": r"fit +(?:fits|tight) · (≈?\d[\d.,]*\d) tok/s", "doctor": r"speed (≈?\d[\d.,]*\d) tok/s",
               "F12": r"(?:plain|predicted) +(≈?\d[\d.,]*\d) tok/s"},
    "read rate": {"details": r"per token at (\d[\d.]*) GB/s", "show": r"speed ≈[^:]*: (\d[\d.]*) GB/s",
                  "plan": r"plain decoding (\d[\d.]*) \("},
    "bytes per token": {"F12": PER_TOKEN, "doctor": PER_TOKEN, "show": PER_TOKEN, "plan": PER_TOKEN},
    "memory": {"F12": r"needs ([\d.]+) GB, loaded", "doctor": NEEDED, "show": NEEDED,
               "plan": NEEDED, "details": NEEDED},
    "cores": {"F12": IN_USE, "doctor": IN_USE, "why": r"threads (\d+) on ([\d,-]+)"},
    "speed": {"all figures": r"answer (\d[\d.,]*\d) tok/s", "F12": r"plain (\d[\d.,]*\d) tok/s"},
    "utilization": {"panel": r"bandwidth (\d+) %", "all figures": r" (\d+) %"},
}  # fmt: skip
"""What shows each figure, and how to read it there."""


def require_equal(texts: dict[str, str], *figures: str) -> None:
    """All views that were opened show the same of each figure; none of them leaves it out."""
    for figure in figures:
        read = {view: re.findall(how, texts[view]) for view, how in SHOWN[figure].items() if view in texts}
        assert len({found[0] if found else None for found in read.values()}) == 1 and all(read.values()), (
            figure, {view: found[:1] for view, found in read.items()}, texts,
        )  # fmt: skip


async def in_app(model: ModelInfo, asks: bool) -> dict[str, str]:
    """Return what the app shows of a loaded model; where it `asks`, after an answer."""
    *steps, finished = said("Here it is.")
    assert isinstance(finished, GenerationFinished)
    timings = answer(100.0, n=300, prompt_n=500, n_past=800, prompt_ms=100.0)  # in its middle: 650 tokens
    backend = OnMachine(model, POLICY, answers=[[*steps, msgspec.structs.replace(finished, timings=timings)]])
    file = Path(model.path)
    async with running(backend, size=(200, 60), model=file, folders=(file.parent,)) as app:
        await app.ready()
        if asks:
            await app.send("Show it.")
        return await screens(app) | (await panels(app) if asks else {})


@pytest.mark.parametrize(
    "engine", [{}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "ctx": 4096}], ids=["f16", "q8_0"]
)
def test_every_view_shows_the_same_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, object]
) -> None:
    """F12, panel, list and details of models, plan, doctor, why and show, before a model's first answer and after."""
    monkeypatch.setattr("cpuchat.hardware.topology.Topology.l3_bytes", lambda *_: 0)  # no model fits in a cache
    file = write_model(tmp_path / "models" / "some.gguf", "0.05b", "Q8_0")
    settings.update({
        "engine": engine, "hardware": {"probe": False}, "model": {"folders": [str(file.parent)], "last": str(file)},
    })  # fmt: skip
    keep(ReadBandwidth(CPUS, 50e9, (50e9,), (1.0,)), POLICY)
    CostLog(CPUS, POLICY).probed(probe(two_cores()))
    work = model_work(read_model(file), settings.load().load_options(), alike=ALIKE)
    model = info(file, cpus=CPUS, n_threads=len(CPUS), n_ctx=4096, peak_read=0.0, work=work, fingerprint="f" * 32)
    texts = asyncio.run(in_app(model, asks=False)) | commands(file)
    require_equal(texts, "limit", "predicted", "listed", "read rate", "bytes per token", "memory", "cores")
    texts = asyncio.run(in_app(model, asks=True)) | commands(file)
    texts["why"] = on_one_line(run("why", str(file), "--drafters", "off").stdout)
    require_equal(texts, *(SHOWN.keys() - {"read rate"}))  # what was measured follows from no rate
