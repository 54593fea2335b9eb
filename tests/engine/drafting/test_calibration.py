"""Tests pass costs: measured once, cached under a key of everything that they depend on."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from cpuchat.costs.calibrations import PassCosts
from cpuchat.engine.drafting import calibration
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.measure import store
from cpuchat.measure.subject import Subject
from cpuchat.models import costs as costs_record
from tests.engine.conftest import Load
from tests.support.pair_files import write_pair
from tests.support.pairs import N_VOCAB, OPTIONS

ON = Subject(cores=(0,), model=("t", "d"))

COSTS = PassCosts(verify_ms=tuple(30.5 + n for n in range(32)), draft_ms=2.5, read_ms=0.25, rollback_ms=1.5)


@pytest.fixture
def models(load: Load, files: tuple[Path, Path]) -> tuple[Model, Model]:
    target = load(files[0], OPTIONS)
    return target, load(files[1], OPTIONS, threads=target.pool)


def test_what_is_kept_is_found_for_the_same_subject() -> None:
    assert costs_record.calibration(ON) is None
    for costs in (COSTS, PassCosts(COSTS.verify_ms)):
        costs_record.keep_calibration(ON, costs)
        assert costs_record.calibration(ON).value == costs
    assert costs_record.calibration(replace(ON, model=("t",))) is None


def test_what_was_learned_about_a_pair_counts_on_all_cores() -> None:
    assert costs_record.accepted("t", "d") == (0.0, 0.0)
    costs_record.keep_accepted("t", "d", (30.0, 100.0))
    assert costs_record.accepted("t", "d") == (30.0, 100.0)
    assert costs_record.accepted("t", "e") == (0.0, 0.0)


def test_key_holds_what_the_costs_depend_on(load: Load, models: tuple[Model, Model], tmp_path: Path) -> None:
    target, draft = models
    other = tmp_path / "other.gguf"
    write_pair(other, None, 0.5, target="tiny", n_vocab=N_VOCAB, seed=5)
    keys = [
        calibration.conditions(target).key,
        calibration.conditions(target, draft).key,
        calibration.conditions(target, target).key,
        calibration.conditions(load(other, OPTIONS)).key,
    ]
    changes = [
        {"type_k": "q8_0", "type_v": "q8_0"}, {"type_k": "q8_0"}, {"flash_attn": "off"}, {"use_repack": False},
        {"n_ubatch": 32}, {"poll": 0}, {"load_mode": "read"},
    ]  # fmt: skip
    if len(own_cpus()) > 1:
        # The thread of this test is pinned by now: before the next model is loaded it must be free again.
        draft.free()
        target.free()
        changes += [{"n_threads": 2}, {"n_threads": 0, "cpus": own_cpus()[-1:]}]
    path = target.header.path
    for change in changes:
        model = load(path, msgspec.structs.replace(OPTIONS, **change))
        keys.append(calibration.conditions(model).key)
        model.free()
    assert len(set(keys)) == len(keys)
    again = load(path, msgspec.structs.replace(OPTIONS, n_ctx=256, mlock=False))
    assert calibration.conditions(again).key == keys[0]


def test_measuring(models: tuple[Model, Model]) -> None:
    target, draft = models
    target.sequence.extend([300, 301])
    seen: list[tuple[int, int]] = []
    costs = calibration.measure(target, draft, lambda *p: seen.append(p))
    assert len(costs.verify_ms) == 32 and min(costs.verify_ms) > 0
    assert costs.draft_ms > 0 and costs.read_ms > 0
    assert seen == [(n, seen[-1][1]) for n in range(len(seen) - 1)] + [(seen[-1][1], seen[-1][1])]
    assert not target.sequence.tokens and not draft.sequence.tokens
    alone = calibration.measure(target, None, lambda *_: None)
    assert alone.draft_ms == alone.read_ms == 0


@pytest.mark.parametrize("at", [1, 20, 47])
def test_stopping_it(models: tuple[Model, Model], abort: AbortFlag, at: int) -> None:
    target, draft = models
    with pytest.raises(Aborted):  # 47: of 16 sizes, each measured three times, one is left; then come the draft's
        calibration.measure(target, draft, lambda done, _: abort.set() if done == at else None)
    abort.clear()
    assert not target.sequence.tokens and not draft.sequence.tokens
    row = target.sequence.step(300).copy()
    target.sequence.clear()
    assert (target.sequence.step(300) == row).all()


def test_implausible_costs_are_neither_kept_nor_read() -> None:
    wrong = replace(COSTS, verify_ms=(30.5, 6.8 * 30.5, *COSTS.verify_ms[2:]))
    costs_record.keep_calibration(ON, wrong)
    assert store.find(ON, costs_record.CALIBRATED, PassCosts) is None
    store.keep(ON, costs_record.CALIBRATED, wrong)
    assert costs_record.calibration(ON) is None


@pytest.mark.parametrize(
    ("changes", "days"), [({}, 30), ({"steady": False}, 1 / 24), ({"disturbed": True}, 1 / 24)], ids=str
)
def test_a_calibration_ages_out(monkeypatch: pytest.MonkeyPatch, changes: dict[str, bool], days: float) -> None:
    """The more its measurements scattered, the sooner."""
    costs_record.keep_calibration(ON, replace(COSTS, **changes))
    found, now = costs_record.calibration(ON), time.time()
    assert found is not None
    monkeypatch.setattr(costs_record.time, "time", lambda: now + 0.9 * days * 86_400)
    assert not costs_record.is_due(found)
    monkeypatch.setattr(costs_record.time, "time", lambda: now + 1.1 * days * 86_400)
    assert costs_record.is_due(found)


def test_a_size_that_was_disturbed_each_time_is_measured_again(
    models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disturbance that lasts as long as the three rounds do, for two sizes."""
    true = dict(enumerate(COSTS.verify_ms, 1))
    seen: Counter[int] = Counter()

    def passed(_: object, n: int) -> tuple[float, float]:
        seen[n] += 1
        return true[n] * (7.0 if n in (2, 5) and seen[n] <= 5 else 1.0), 0.0

    monkeypatch.setattr(calibration.Curve, "timed_pass", passed)
    costs = calibration.measure(models[0], None, lambda *_: None)
    assert costs.verify_ms == pytest.approx(COSTS.verify_ms)
    assert seen[3] <= 4 < seen[2] < 8


def test_passes_that_waited_for_a_core_are_marked(models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """The best pass of a size counts: what a disturbance made slower says nothing about it."""
    true, waited = dict(enumerate(COSTS.verify_ms, 1)), 0.0
    seen: Counter[int] = Counter()
    disturbed: dict[int, int] = {}  # passes over so many tokens, until as many were seen

    def passed(_: object, n: int) -> tuple[float, float]:
        nonlocal waited
        seen[n] += 1
        waited = 0.5 if seen[n] <= disturbed.get(n, 0) else 0.0
        return true[n] * (1.2 if waited else 1.0), 0.0

    monkeypatch.setattr(calibration.Curve, "timed_pass", passed)
    monkeypatch.setattr(calibration.CpuWait, "share", lambda _: waited)

    def is_disturbed(until: dict[int, int]) -> bool:
        seen.clear()
        disturbed.clear()
        disturbed.update(until)
        return calibration.measure(models[0], None, lambda *_: None).disturbed

    assert not is_disturbed({})
    assert not is_disturbed(dict.fromkeys(range(1, 33), 2))
    assert not is_disturbed(dict.fromkeys(range(2, 8), 99))
    assert is_disturbed({1: 99}), "the speed-up over plain decoding would be wrong"
    assert is_disturbed(dict.fromkeys(range(2, 33), 99))
