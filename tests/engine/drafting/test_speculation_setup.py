"""Tests what is loaded with a target. Whatever is wrong with it, the target answers, and the user hears why."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpuchat import paths
from cpuchat.engine import engine
from cpuchat.engine.drafting import cached_costs, calibration
from cpuchat.engine.drafting.speculation_setup import SpeculationSetup, set_up_speculation
from cpuchat.engine.engine import Engine
from cpuchat.engine.llama import limits
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.model_info import ModelInfo
from cpuchat.models.drafts import calibrations
from cpuchat.models.drafts.calibrations import target_costs
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol import (
    Event,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    LoadModel,
    LoadProgress,
    ModelLoaded,
    Sampling,
    Speculation,
    TextDelta,
)
from cpuchat.speculation.depth.costs import PassCosts
from cpuchat.synthetic.model import write_model
from cpuchat.synthetic.pair import write_pair
from cpuchat.synthetic.shapes import SHAPES
from cpuchat.telemetry.machine import Peak
from cpuchat.timings import Timings
from tests.support.cores import ONE_CPU
from tests.support.pairs import N_VOCAB, OPTIONS, pair_files
from tests.support.tiny_gguf import write_tiny_gguf

Load = Callable[..., Model]

PLENTY = 1 << 40
PLAIN = Speculation()
ALL = Speculation(drafters=("draft", "suffix", "lookup"), depth=4)


class Chat:
    """An engine and what it said."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.react: Callable[[Event], None] = lambda _: None
        self.engine = Engine(self._emit)

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.react(event)

    def command(self, path: Path, **more: Any) -> Event:
        fields = {name: more.pop(name) for name in ("calibration_file", "draft_cpus") if name in more}
        fields = {"cpus": more.pop("cpus", ONE_CPU), **fields}
        options = msgspec.structs.replace(OPTIONS, **more)
        self.events.clear()
        self.engine.load(LoadModel(path=str(path), options=options, **fields))
        self.engine.clear_cancel()
        return self.events[-1]

    def load(self, path: Path, **more: Any) -> ModelInfo:
        loaded = self.command(path, **more)
        assert isinstance(loaded, ModelLoaded), loaded
        return loaded.model

    def ask(self, speculation: Speculation = PLAIN, **more: Any) -> tuple[str, Timings]:
        self.events.clear()
        fields = {"prompt": "a b c d", "sampling": Sampling(temperature=0.0), "max_tokens": 40, **more}
        self.engine.generate(Generate(request_id=1, speculation=speculation, **fields))
        finished = self.events[-1]
        assert isinstance(finished, GenerationFinished), finished
        return "".join(e.text for e in self.events if isinstance(e, TextDelta)), finished.timings

    def phases(self) -> set[str]:
        return {e.phase for e in self.events if isinstance(e, LoadProgress)}


@pytest.fixture
def chat() -> Iterator[Chat]:
    chat = Chat()
    yield chat
    chat.engine.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair_files(tmp_path_factory.mktemp("pair"), 0.5)


def assert_answers(chat: Chat) -> None:
    """Assert that the answer is the same with and without drafters."""
    plain, timings = chat.ask()
    assert plain and timings.speculation is None
    drafted, timings = chat.ask(ALL)
    assert drafted == plain
    assert timings.speculation is not None
    assert "draft" not in {count.name for count in timings.speculation.by_drafter}


def test_a_pair(chat: Chat, files: tuple[Path, Path]) -> None:
    info = chat.load(files[0], draft_path=str(files[1]))
    assert info.draft and info.draft_quantization == "Q8_0" and info.draft_cpus == info.cpus
    assert info.no_speculation == "" and info.notes == ()
    plain, _ = chat.ask()
    drafted, timings = chat.ask(ALL)
    assert drafted == plain and timings.draft_n_accepted


def test_threads_of_the_target_serve_both(chat: Chat, files: tuple[Path, Path]) -> None:
    """The engine's thread is pinned when the draft model is loaded."""
    cpus = own_cpus()[:2]
    for _ in range(2):
        info = chat.load(files[0], draft_path=str(files[1]), cpus=cpus)
        assert info.notes == () and info.draft and info.draft_cpus == info.cpus == cpus


def test_demo_pair(chat: Chat) -> None:
    demo, draft = (paths.demo_dir() / DEMO_FILES[name] for name in ("demo", "demo-draft"))
    info = chat.load(demo, draft_path=str(draft))
    assert info.notes == ()
    plain, _ = chat.ask(prompt="A draft model is", max_tokens=60)
    drafted, timings = chat.ask(ALL, prompt="A draft model is", max_tokens=60)
    assert drafted == plain and timings.draft_n_accepted


def test_draft_of_another_vocabulary(chat: Chat, files: tuple[Path, Path], tiny_model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    write_pair(small, None, 0.5, target="tiny", n_vocab=1024)
    for draft, reason in ((tiny_model, "tokenizer"), (small, "1,024 tokens")):
        info = chat.load(files[0], draft_path=str(draft))
        [note] = info.notes
        assert note.startswith("No draft model: ") and reason in note
        assert info.draft == "" and info.draft_cpus == ()
        assert_answers(chat)


def test_draft_that_has_a_few_tokens_less(chat: Chat, tmp_path: Path) -> None:
    """Up to 128 may be missing: such tokens of the text cannot be read by the draft model, and none is drafted."""
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    write_pair(target, None, 1.0, target="tiny", n_vocab=N_VOCAB)
    write_pair(tmp_path / "other.gguf", draft, 1.0, target="tiny", draft="tiny", n_vocab=N_VOCAB - 100)
    info = chat.load(target, draft_path=str(draft))
    assert info.draft
    plain, _ = chat.ask(max_tokens=200)
    drafted, timings = chat.ask(ALL, max_tokens=200)
    assert drafted == plain and timings.draft_n


@pytest.mark.parametrize("kind", ["missing", "damaged", "itself", "folder"])
def test_draft_that_is_none(chat: Chat, files: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    file = {"itself": files[0], "folder": tmp_path}.get(kind, tmp_path / "draft.gguf")
    if kind == "damaged":
        file.write_bytes(files[1].read_bytes()[:2000])
    info = chat.load(files[0], draft_path=str(file))
    [note] = info.notes
    assert note.startswith("No draft model: ")
    assert_answers(chat)


def test_draft_that_does_not_fit(load: Load, files: tuple[Path, Path], abort: AbortFlag) -> None:
    target = load(files[0], OPTIONS)
    options = msgspec.structs.replace(OPTIONS, draft_path=str(files[1]))
    command = LoadModel(path=str(files[0]), cpus=ONE_CPU, options=options)
    for available in (1 << 20, 0, -5):
        companions = set_up_speculation(target, command, available, lambda *_: None, abort)
        assert companions.draft is None and companions.thread is None
        assert "does not fit" in target.info.notes[-1] or "memory" in target.info.notes[-1]
    companions = set_up_speculation(target, command, PLENTY, lambda *_: None, abort)
    assert companions.draft is not None and target.info.draft
    companions.free()


def test_recurrent_draft(chat: Chat, tiny_model: Path, recurrent_model: Path) -> None:
    info = chat.load(tiny_model, draft_path=str(recurrent_model))
    [note] = info.notes
    assert "recurrent" in note or "running state" in note
    assert info.draft == ""
    assert_answers(chat)


def test_recurrent_target(chat: Chat, recurrent_model: Path, tiny_model: Path) -> None:
    """Whether it drafts or says why not, the text is the same."""
    info = chat.load(recurrent_model, draft_path=str(tiny_model))
    plain, _ = chat.ask()
    drafted, timings = chat.ask(ALL)
    assert drafted == plain
    assert timings.speculation is not None
    if info.no_speculation:
        assert timings.draft_n == 0 and timings.speculation.reason == info.no_speculation
        assert info.no_speculation.startswith("off: ")


def test_one_token_batches_cannot_verify(chat: Chat, files: tuple[Path, Path]) -> None:
    info = chat.load(files[0], draft_path=str(files[1]), n_batch=1, n_ubatch=1)
    assert info.no_speculation and info.draft == ""
    assert_answers(chat)


# --- cores ----------------------------------------------------------------------------------------------------------


def test_cores_of_its_own(chat: Chat, files: tuple[Path, Path]) -> None:
    cpus = own_cpus()
    if len(cpus) < 2:
        pytest.skip("one core cannot do two things at once")
    mine, its = cpus[:1], cpus[-1:]
    info = chat.load(files[0], draft_path=str(files[1]), cpus=mine, draft_cpus=its)
    assert (info.draft_cpus, info.cpus, info.n_threads) == (its, mine, 1)
    plain, _ = chat.ask()
    drafted, timings = chat.ask(ALL)
    assert drafted == plain and timings.draft_n_accepted
    # The thread that loads is pinned by now and must reach all CPUs again.
    info = chat.load(files[0], draft_path=str(files[1]), cpus=its, draft_cpus=mine)
    assert (info.draft_cpus, info.cpus) == (mine, its)
    # And all of them without a draft model.
    assert chat.load(files[0], cpus=cpus).cpus == cpus


def test_utilization_is_of_what_the_cores_of_both_models_read(
    chat: Chat, files: tuple[Path, Path], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(cpus: tuple[int, ...], disturbed: bool = True) -> Peak:
        return Peak(1e9 * len(cpus), "measured", cpus)

    monkeypatch.setattr(limits, "known_peak", known)
    monkeypatch.setattr(limits, "should_measure", lambda _: False)
    cpus = own_cpus()
    if len(cpus) > 1:
        its = cpus[-1:]
        info = chat.load(files[0], draft_path=str(files[1]), cpus=cpus[:1], draft_cpus=its)
        assert (info.peak_read, info.compute_cpus) == (2e9, (cpus[0], cpus[-1]))
        # A draft model that cannot be used does not compute.
        info = chat.load(files[0], draft_path=str(tiny_model), cpus=cpus[:1], draft_cpus=its)
        assert (info.draft, info.peak_read, info.compute_cpus) == ("", 1e9, cpus[:1])
    assert chat.load(files[0]).peak_read == 1e9


def test_a_fault_at_the_end_of_a_load_leaves_nothing_half_loaded(
    chat: Chat, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    before = os.sched_getaffinity(0)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "describe_with_limits", broken)
        with pytest.raises(KeyError):
            chat.command(files[0], draft_path=str(files[1]))
    assert os.sched_getaffinity(0) == before  # the threads that this one was pinned with are gone
    assert chat.load(files[0], draft_path=str(files[1])).draft
    assert chat.ask(ALL)[1].speculation is not None


# --- experts --------------------------------------------------------------------------------------------------------


def test_experts(chat: Chat, tmp_path: Path) -> None:
    """Fewer experts are another text, a number that does not exist is refused, and nothing aborts."""
    shape = msgspec.structs.replace(
        SHAPES["30b-a3b"], name="tiny-moe", n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=32, n_vocab=512, head=32,
        n_expert=16, n_expert_used=4, n_ctx=1024,
    )  # fmt: skip
    file = write_model(tmp_path / "moe-F32.gguf", shape, "F32")
    texts = {}
    for n in (0, 4, 1, 2, 16):
        info = chat.load(file, n_experts=n)
        assert (info.n_expert, info.n_expert_used) == (16, n or 4)
        texts[n], _ = chat.ask()
        drafted, timings = chat.ask(Speculation(drafters=("lookup", "suffix"), depth=3))
        assert drafted == texts[n] and timings.speculation is not None
    assert texts[0] == texts[4] and texts[1] != texts[4] != texts[16]
    for n in (-1, 17, 1 << 30):
        failed = chat.command(file, n_experts=n)
        assert isinstance(failed, Failed) and failed.code == "usage"
    assert chat.load(file).n_expert_used == 4


# --- calibration ----------------------------------------------------------------------------------------------------


def test_costs_are_measured_once(
    chat: Chat, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "costs.json"
    more = {"draft_path": str(files[1]), "calibration_file": str(file)}
    assert chat.load(files[0], **more).pass_ms == ()  # not asked for
    monkeypatch.setattr(calibrations, "DEAREST", math.inf)  # else a busy machine decides whether it is kept
    monkeypatch.setattr(calibrations, "LEAST", 0.0)
    monkeypatch.setattr(calibrations, "STEEPEST", 0.0)
    monkeypatch.setattr(calibration, "cpu_wait_share", lambda *_: 0.0)
    first = chat.load(files[0], calibrate=True, **more)
    assert "calibrating" in chat.phases() and len(first.pass_ms) == 32
    again = chat.load(files[0], calibrate=True, **more)
    assert "calibrating" not in chat.phases() and again.pass_ms == first.pass_ms
    assert chat.load(files[0], **more).pass_ms == first.pass_ms  # what is known is used anyway
    found = target_costs(files[0], file)  # what tells the gain of a draft model before it is loaded
    assert found.pass_ms == first.pass_ms
    assert found.measured_draft(files[1]) > 0 == found.measured_draft(files[0])
    assert len(calibrations.calibration_cache(file).read()) == 2  # the other is that of the target alone
    plain, _ = chat.ask()
    drafted, timings = chat.ask(Speculation(drafters=("draft", "suffix", "lookup")))
    assert drafted == plain
    assert timings.speculation is not None and timings.speculation.plain_ms


def test_a_pair_is_known_after_a_restart(
    chat: Chat, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "costs.json"
    costs = PassCosts(tuple(5.0 + 0.1 * n for n in range(32)), draft_ms=0.1, read_ms=0.05)
    monkeypatch.setattr(cached_costs, "measure", lambda *_, **__: costs)
    more = {"draft_path": str(files[1]), "calibration_file": str(file), "calibrate": True}

    def compared() -> list[float]:
        return [one.compared for one in calibrations.calibration_cache(file).read().values() if one.draft]

    chat.load(files[0], **more)
    assert compared() == [0.0]
    chat.ask(Speculation(drafters=("draft",)))
    chat.engine.idle()
    [before] = compared()
    assert before > 8
    chat.load(files[0], **more)
    chat.ask(Speculation(drafters=("draft",)))
    chat.engine.close()
    [after] = compared()
    assert after > before


def test_a_disturbed_calibration_is_said_and_made_again(
    chat: Chat, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"draft_path": str(files[1]), "calibration_file": str(tmp_path / "costs.json"), "calibrate": True}
    quiet = PassCosts(tuple(5.0 + n for n in range(32)), draft_ms=1.0, read_ms=0.5)
    disturbed = replace(quiet, verify_ms=(5.0, 34.0, *quiet.verify_ms[2:]))
    monkeypatch.setattr(cached_costs, "measure", lambda *_, **__: disturbed)
    info = chat.load(files[0], **more)
    [note] = info.notes
    assert "disturbed by other programs: a pass over 2 tokens took 34 ms" in note and "reload the model" in note
    assert info.pass_ms == () and not (tmp_path / "costs.json").exists()
    _, timings = chat.ask(Speculation(drafters=("draft",)))
    assert timings.speculation is not None
    assert timings.speculation.reason == "off: calibration disturbed by other programs"
    monkeypatch.setattr(cached_costs, "measure", lambda *_, **__: quiet)
    assert chat.load(files[0], **more).pass_ms == quiet.verify_ms
    # Too old by now, but better than one beside other load.
    monkeypatch.setattr(cached_costs, "KEPT_SECONDS", -1.0)
    monkeypatch.setattr(cached_costs, "measure", lambda *_, **__: disturbed)
    info = chat.load(files[0], **more)
    assert (info.pass_ms, info.notes) == (quiet.verify_ms, ())


class Cores:
    """Stands in for `BusyCores`: so many are busy."""

    busy = 0.0

    def since_last(self, cpus: object) -> float:
        return self.busy


def test_a_calibration_beside_other_programs_counts_until_the_cores_are_idle(
    chat: Chat, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plain pass took twice as long, so it must not tell how much faster drafts are."""
    more = {"draft_path": str(files[1]), "calibration_file": str(tmp_path / "costs.json"), "calibrate": True}
    quiet = PassCosts(tuple(5.0 + n for n in range(32)), draft_ms=1.0, read_ms=0.5)
    disturbed = replace(quiet, verify_ms=tuple(2 * ms for ms in quiet.verify_ms), disturbed=True)
    found = [disturbed]
    monkeypatch.setattr(cached_costs, "measure", lambda *_, **__: found.pop())
    monkeypatch.setattr(cached_costs, "BusyCores", Cores)
    monkeypatch.setattr(cached_costs, "_LOOK_SECONDS", 0.0)
    info = chat.load(files[0], **more)
    [note] = info.notes
    assert "Other programs disturbed the calibration" in note
    assert info.pass_ms == () and target_costs(files[0], tmp_path / "costs.json").pass_ms == ()
    _, fixed = chat.ask(Speculation(drafters=("draft",), depth=4))
    assert fixed.speculation is not None and fixed.draft_n
    assert fixed.speculation.plain_ms is fixed.speed_up is None
    monkeypatch.setattr(Cores, "busy", 1.5)
    info = chat.load(files[0], **more)  # measures nothing: `found` is empty
    assert (info.pass_ms, info.notes) == ((), ())
    monkeypatch.setattr(Cores, "busy", 0.1)
    found.append(quiet)
    assert chat.load(files[0], **more).pass_ms == quiet.verify_ms
    _, fixed = chat.ask(Speculation(drafters=("draft",), depth=4))
    assert fixed.speculation is not None and fixed.speculation.plain_ms and fixed.speed_up


def test_an_earlier_calibration_is_better_than_one_beside_other_programs(
    chat: Chat, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"draft_path": str(files[1]), "calibration_file": str(tmp_path / "costs.json"), "calibrate": True}
    quiet = PassCosts(tuple(5.0 + n for n in range(32)), draft_ms=1.0, read_ms=0.5)
    found = [replace(quiet, verify_ms=tuple(2 * ms for ms in quiet.verify_ms), disturbed=True), quiet]
    monkeypatch.setattr(cached_costs, "measure", lambda *_, **__: found.pop())
    with monkeypatch.context() as patch:
        patch.setattr(cached_costs, "KEPT_SECONDS", -1.0)
        for left in (1, 0):
            info = chat.load(files[0], **more)
            assert (info.pass_ms, info.notes, len(found)) == (quiet.verify_ms, (), left)
    assert chat.load(files[0], **more).pass_ms == quiet.verify_ms  # for an hour, like one that scattered


def test_a_stop_skips_the_measurement(chat: Chat, files: tuple[Path, Path], tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, LoadProgress) and event.phase == "calibrating":
            chat.engine.cancel()

    chat.react = stop
    more = {"draft_path": str(files[1]), "calibration_file": str(tmp_path / "costs.json"), "calibrate": True}
    info = chat.load(files[0], **more)
    chat.react = lambda _: None
    [note] = info.notes
    assert "skipped" in note
    assert info.draft and info.pass_ms == () and not (tmp_path / "costs.json").exists()
    plain, _ = chat.ask()
    drafted, timings = chat.ask(Speculation(drafters=("draft",)))
    assert drafted == plain
    assert timings.draft_n == 0
    assert timings.speculation is not None and timings.speculation.reason == "off: calibration skipped"
    drafted, timings = chat.ask(ALL)  # a depth that was asked for needs no costs
    assert drafted == plain and timings.draft_n


def test_a_stop_while_the_draft_is_read_stops_the_load(chat: Chat, files: tuple[Path, Path]) -> None:
    """The target's file is read to its end first; what is stopped then is the draft's."""
    finished = [0]

    def stop(event: Event) -> None:
        if isinstance(event, LoadProgress) and event.phase == "reading" and event.done == event.total:
            finished[0] += 1
            if finished[0] == 2:
                chat.engine.cancel()

    chat.react = stop
    assert isinstance(chat.command(files[0], draft_path=str(files[1])), LoadCancelled)
    chat.react = lambda _: None
    chat.load(files[0])
    assert chat.ask()[0]


def test_freeing_twice(load: Load, files: tuple[Path, Path], abort: AbortFlag) -> None:
    target = load(files[0], OPTIONS)
    options = msgspec.structs.replace(OPTIONS, draft_path=str(files[1]))
    command = LoadModel(path="", cpus=ONE_CPU, options=options)
    companions = set_up_speculation(target, command, PLENTY, lambda *_: None, abort)
    assert isinstance(companions, SpeculationSetup) and companions.draft is not None
    companions.free()
    companions.free()
    assert companions.draft is None
    assert target.sequence.step(300) is not None


def test_no_template_needed(chat: Chat, tmp_path: Path) -> None:
    """Random weights of a format that knows the plain stops: these are looked for inside drafts too."""
    file = write_tiny_gguf(tmp_path / "plain.gguf", with_template=False)
    info = chat.load(file)
    assert not info.has_template
    plain, _ = chat.ask(stop=("e",), max_tokens=100)
    drafted, _ = chat.ask(Speculation(drafters=("lookup", "suffix"), depth=5), stop=("e",), max_tokens=100)
    assert drafted == plain
