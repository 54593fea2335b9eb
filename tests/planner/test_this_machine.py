"""Tests this machine as one to plan for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cpuchat.config.settings import Settings, with_changes
from cpuchat.costs.usual import Figure
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import read_topology
from cpuchat.measure.peak import ReadBandwidth, keep
from cpuchat.models.catalog import load_catalog
from cpuchat.models.costs import CostLog
from cpuchat.models.fit import draft_memory, plan_memory, snapshots
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library import usage
from cpuchat.models.library.library import Library
from cpuchat.models.machine import Tuned, keep_tuned, this_machine
from cpuchat.models.prediction import predict
from cpuchat.models.synthetic.model import write_model
from cpuchat.models.traffic import model_work
from cpuchat.planner import plan as planner
from cpuchat.planner.plan import (
    ACCEPTANCES,
    PlannedWorkload,
    ThisMachine,
    catalog_plans,
    find_machine,
    find_model,
    from_header,
    included_head,
    make_plan,
    models_here,
    usual_draft,
)
from cpuchat.present.chats import welcome
from cpuchat.present.plan import doubt, lines
from cpuchat.protocol.messages import LoadOptions
from tests.costs.made_up import decode_rate, probe, two_cores
from tests.models.library.test_usage import answer, info
from tests.support.head_model import TINY, write_head_model
from tests.support.topology import simulate_topology

DEEP = replace(TINY, n_layer=8, n_state_head=16, state=64)
"""Snapshots of its state are worth it only beside a draft: three."""


def test_a_tuned_model_is_planned_on_its_own_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_model(tmp_path / "tiny.gguf", "tiny", "Q8_0")
    topology = simulate_topology(monkeypatch, tmp_path / "desktop")
    every, one = (choose_cores(topology, "auto", n).cpus for n in (0, 1))
    keep(ReadBandwidth(cpus=every, bytes_per_s=40e9, rounds=(40e9,)))
    keep_tuned(file, Tuned(model="tiny", changes={"engine": {"threads": 1}}))
    model = from_header(read_model(file))
    assert ThisMachine(Settings()).of(model).cores.value == len(every)  # the others were not measured
    keep(ReadBandwidth(cpus=one, bytes_per_s=25e9, rounds=(25e9,)))
    found = ThisMachine(Settings()).of(model)
    assert (found.cores.value, found.read_gbs.value) == (1, 25)
    assert ThisMachine(Settings()).of().cores.value == len(every)


def test_a_head_in_a_file_is_planned_and_its_memory_counts_once(tmp_path: Path) -> None:
    """As a load counts it: with its buffers, and with more snapshots of the model's state than without a draft."""
    header = read_model(write_head_model(tmp_path / "model.gguf", 0.5, shape=DEEP))
    model, catalog = from_header(header), load_catalog()
    head = usual_draft(model, catalog, chosen=Settings())
    assert head is not None and head.name == "MTP head"
    machine = ThisMachine(Settings()).of(model, head)
    alone, with_head = (make_plan(machine, model, PlannedWorkload(), draft=one) for one in (None, head))
    memory, options = with_head.memory, LoadOptions(n_ctx=8192, draft_path=str(header.path))
    assert (memory.need, snapshots(header, options)) == plan_memory(header, options, memory.available)
    assert memory.need.kv > alone.memory.need.kv
    assert memory.draft_need == draft_memory(header, options, 8192, header)
    here = msgspec.structs.replace(this_machine(Settings()), available=memory.available)
    listed = predict(header, LoadOptions(n_ctx=8192), here, draft=header)
    assert (listed.need, listed.draft_need) == (memory.need, memory.draft_need)
    assert with_head.draft == head and head.work.weight_bytes < model.work.weight_bytes


def test_a_plan_promises_no_longer_drafts_than_can_be_rolled_back_or_drafted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpuchat.models.heads.SEVERAL_MTP", {"qwen35"})
    slow = msgspec.structs.replace(find_machine("epyc-9754"), theoretical=None, decode=None, measured=Figure(0.001))
    for n_mtp, deepest in ((1, 3), (2, 1)):
        shape = replace(DEEP, n_mtp=n_mtp)
        model = from_header(read_model(write_head_model(tmp_path / f"{n_mtp}.gguf", 0.5, shape=shape)))
        plan = make_plan(slow, model, PlannedWorkload(), draft=included_head(model))
        assert [one.depth for one in plan.drafted] == [deepest] * len(ACCEPTANCES)


def test_lists_and_plans_of_a_file_that_is_here_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its header, with what chats with it told, and with a draft model that is as slow as its own chats were."""
    file, small = (write_model(tmp_path / f"{name}.gguf", name, "Q8_0") for name in ("0.05b", "tiny"))
    cpus, catalog = choose_cores(read_topology(), "auto").cpus, load_catalog()
    chosen = with_changes(Settings(), {"model": {"folders": [str(tmp_path)]}})
    keep(ReadBandwidth(cpus=cpus, bytes_per_s=25e9, rounds=(25e9,)), "local")
    CostLog(cpus, "local").probed(probe(two_cores()))
    for path, slower in ((file, 1.5), (small, 3.0)):
        rate = decode_rate(two_cores(), model_work(read_model(path)), 100) / slower
        usage.answered(info(path, fingerprint=path.stem, cpus=cpus), answer(rate, n=201, n_past=200), "local")
    entry = catalog.find("qwen3-8b")
    monkeypatch.setattr(planner, "match_local", lambda known, one: entry if one.path == file else None)
    here = models_here(catalog, chosen)
    machine = ThisMachine(Settings())
    plans = catalog_plans(machine.of, catalog, PlannedWorkload(), here)
    listed = next(plan for plan in plans if plan.model.name == entry.name)
    assert str(small) in {plan.model.path for plan in plans}  # which the catalog has not
    model = find_model("qwen3-8b", catalog, chosen)
    assert listed.tok_s == make_plan(machine.of(model), model, PlannedWorkload()).tok_s
    predicted = predict(read_model(file), LoadOptions(), this_machine(Settings()))
    assert listed.tok_s is not None and listed.tok_s.value == pytest.approx(predicted.tok_s, rel=0.01)
    assert listed.memory.need == predicted.need
    pair = machine.of(model, from_header(read_model(small)))
    assert pair.draft_factor == pytest.approx(2, rel=0.35) and machine.of(model).draft_factor != pair.draft_factor


@pytest.mark.parametrize(
    ("share", "decoding", "low", "high", "said"),
    [
        (None, r"[\d.]+ \([\d.]+–[\d.]+\) GB/s of [\d.]+ \([\d.]+–[\d.]+\) ÷", 0.5, 2, "up to 2× off"),
        (0.14, r"76 \(63–153\) GB/s of 90 or more ÷", 0.7 / 0.85, 2, "may be higher"),
        (1.0, r"76 \(63–86\) GB/s of 90 ÷", 0.7 / 0.85, 0.95 / 0.85, ""),
    ],
    ids=["estimated", "at-least", "measured"],
)
def test_a_plan_is_as_wide_as_the_bandwidth_is_uncertain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: float | None,
    decoding: str,
    low: float,
    high: float,
    said: str,
) -> None:
    """Whatever a small model told, of which passes are mostly overhead; with that one its own passes count."""
    cpus, catalog = choose_cores(read_topology(), "auto").cpus, load_catalog()
    small = write_model(tmp_path / "tiny.gguf", "tiny", "Q8_0")
    usage.answered(info(small, fingerprint="f" * 32, cpus=cpus), answer(2000.0, n=201, n_past=200), "local")
    if share is not None:
        keep(ReadBandwidth(cpus=cpus, bytes_per_s=90e9, rounds=(90e9,), shares=(share,)), "local")
    machine = ThisMachine(Settings())
    plan = make_plan(machine.of(), find_model("8b", catalog), PlannedWorkload())
    assert plan.machine.decode_gbs("low") == pytest.approx(low * plan.machine.decode_gbs("value"), rel=0.01)
    assert plan.machine.decode_gbs("high") == pytest.approx(high * plan.machine.decode_gbs("value"), rel=0.01)
    assert re.match(decoding, lines(plan)[2][1]) and said in doubt(plan.machine)
    shown, with_own = (welcome(Settings(), None, Library(one, tmp_path / "hub")) for one in ([], [tmp_path]))
    assert ("at least 90 GB/s" in shown.machine) == (share == 0.14) and shown.machine == with_own.machine
    assert shown.offer is not None and shown.offer.model is not None and shown.offer.title.startswith("Download ")
    assert with_own.offer is not None and with_own.offer.path == small and with_own.offer.title.startswith("Open synth")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = welcome(Settings(), None, Library([], tmp_path / "hub")).offer
    assert offline is not None and offline.model is None and "to ~/models" in offline.title
    own = msgspec.structs.replace(from_header(read_model(small)), n_ctx_train=2048)
    assert machine.of().fitted is None and machine.of(own).fitted is not None
    for n_ctx, tokens in ((8192, 2048), (16384, 16384)):  # that of a load, and one that was asked for
        assert make_plan(machine.of(own), own, PlannedWorkload(n_ctx=n_ctx)).memory.need.n_ctx == tokens
