"""Tests the worth of settings with made-up speeds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import MeasureFailed
from cpuchat.bench.why import SettingFacts, worth_cache
from cpuchat.config.settings import Settings
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.protocol.model_info import EngineInfo
from cpuchat.protocol.timings import Timings
from cpuchat.tune.candidates import TuningChoice
from cpuchat.tune.halving import Speed
from cpuchat.tune.measurer import Measurer
from cpuchat.tune.worth import WorthMeasurer, comparisons
from tests.hardware.trees import make_tree
from tests.support.scripted_backend import MODEL


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of what is measured: flash attention gains a fifth of the prefill, one thread halves all."""
    names: list[str] = []

    async def measure(self: Measurer, chosen: Settings, choice: TuningChoice, rung: int, draft: str) -> Speed:
        names.append(choice.name)
        if chosen.engine.load_mode == "read":
            raise MeasureFailed("It does not fit.")
        factor = 1 / 2 if chosen.engine.threads == 16 else 1.0
        prefill = 1.2 if chosen.engine.flash_attn != "off" else 1.0
        return Speed(prefill=100 * prefill * factor, decode=(20 * factor,))

    async def first(self: Measurer, chosen: Settings) -> Speed:
        return Speed(prefill=100, decode=(20,))

    monkeypatch.setattr(Measurer, "measure", measure)
    monkeypatch.setattr(Measurer, "first", first)
    return names


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    return read_topology(make_tree(tmp_path_factory.mktemp("trees"), "epyc-9354"))


def made(topology: Topology, **more: object) -> WorthMeasurer:
    facts = SettingFacts(
        Settings(), msgspec.structs.replace(MODEL, path="model.gguf"), EngineInfo(version="1"), topology, Timings()
    )
    return WorthMeasurer(facts, "key", **more)  # type: ignore[arg-type]


def test_each_setting_against_its_alternative(topology: Topology, measured: list[str]) -> None:
    found = asyncio.run(made(topology, without=frozenset({"repack"})).run())
    threads, attention = found["threads"], found["flash attention"]
    assert threads.alternative == "16 threads"
    assert threads.decode is not None and attention.prefill is not None and attention.decode is not None
    assert (threads.decode.gain, threads.decode.is_sure) == (pytest.approx(1.0), True)
    assert (attention.prefill.gain, attention.prefill.is_sure) == (pytest.approx(0.2), True)
    assert (attention.decode.gain, attention.decode.is_sure) == (pytest.approx(0.0), False)
    assert found["load mode"].skipped == "It does not fit."
    assert found["drafters"].prefill is None
    assert found["SMT siblings"].alternative.endswith("two per core")
    assert "repack" not in found
    assert (measured.count("threads"), measured.count("poll")) == (7, 6)  # which begins with the last of the former


def test_a_stopped_measurement_resumes(topology: Topology, measured: list[str]) -> None:
    def tell(words: str) -> None:
        measurer.stopped = words.startswith("poll")

    measurer = made(topology, tell=tell)
    asyncio.run(measurer.run())
    assert measurer.stopped
    assert set(worth_cache().read()["key"]) == {"threads", "SMT siblings"}
    assert set(measurer.worths) == {"threads", "SMT siblings", "load mode"}
    measured.clear()
    found = asyncio.run(made(topology).run())
    assert not {"threads", "SMT siblings"} & set(measured)
    assert {"threads", "poll"} <= set(found)


def test_a_time_limit_leaves_the_rest(topology: Topology, measured: list[str]) -> None:
    found = asyncio.run(made(topology, seconds=-1.0).run())
    assert found["poll"].skipped == "time limit; measuring again resumes"
    assert measured == []


def test_one_thread_has_no_half(tmp_path: Path) -> None:
    chosen = Settings()
    chosen.engine.threads = 1
    found = {one.name: one for one in comparisons(read_topology(make_tree(tmp_path, "vm")), chosen)}
    assert found["threads"].skipped == "one thread"
