"""Tests drafts of several answers at once: each text is the one that is written alone and without drafts."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import pytest

from cpuchat.costs.calibrations import PassCosts
from cpuchat.engine.drafting import calibration
from cpuchat.engine.states.prompt import RenderedPrompt
from cpuchat.engine.states.store import StateStore
from cpuchat.protocol.messages import (
    Event,
    Generate,
    GenerationFinished,
    Sampling,
    Speculation,
    StateKey,
    TextDelta,
)
from tests.support.chatting import GREEDY
from tests.support.engine_chat import OPTIONS, Chat, user
from tests.support.tiny_gguf import Architecture, write_tiny_gguf
from tests.worker.test_parallel import GRAMMAR

COSTS = PassCosts(tuple(5.0 + 0.01 * n for n in range(32)))  # deep drafts pay
DRAFTING, PLAIN = Speculation(drafters=("suffix",)), Speculation(drafters=())


@dataclass
class Said:
    text: str
    finished: GenerationFinished

    @property
    def outcome(self) -> tuple[str, str, int]:
        return self.text, self.finished.stop_reason, self.finished.timings.predicted_n

    @property
    def drafted(self) -> int:
        return self.finished.timings.draft_n_accepted


@pytest.fixture(autouse=True)
def _calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure", lambda *_, **__: COSTS)


def open_lanes(here: Chat, path: Path, arch: Architecture = "llama", **options: object) -> None:
    write_tiny_gguf(path / "model.gguf", arch=arch, n_embd=128, gain=1.0)  # it repeats itself, with changes
    changed = {"parallel": 4, "n_ctx": 1024, "calibrate": True, **options}
    here.load(path / "model.gguf", msgspec.structs.replace(OPTIONS, **changed))
    for speculator in (here.loaded.speculator, *here.loaded.beside):
        speculator.lookup_share = math.inf  # looking takes as long as a pass of so small a model


def request(text: str, speculation: Speculation = DRAFTING, **fields: Any) -> Generate:
    fields = {"sampling": GREEDY, "max_tokens": 80, "state": StateKey(chat=text), **fields}
    return Generate(messages=(user(text),), speculation=speculation, **fields)


def alone(here: Chat, one: Generate) -> Said:
    """Answer without others, and without drafts."""
    return at_once(here, msgspec.structs.replace(one, speculation=PLAIN))[0]


def at_once(here: Chat, *requests: Generate) -> list[Said]:
    """Answer all of them together: the first one on the engine's thread, which is this one."""
    here.events.clear()
    numbered = [msgspec.structs.replace(one, request_id=n) for n, one in enumerate(requests, 1)]

    def write(one: Generate) -> None:
        here.engine.generate_beside(one, perf_counter())
        here.engine.end_beside(one.request_id)

    threads = [threading.Thread(target=write, args=(one,)) for one in numbered[1:]]
    for one in numbered[1:]:
        here.engine.begin_beside(one.request_id)
    for thread in threads:
        thread.start()
    here.engine.generate(numbered[0])
    here.engine.run_beside()
    for thread in threads:
        thread.join()
    here.engine.clear_cancel()
    finished = {one.request_id: one for one in here.of(GenerationFinished)}
    assert len(finished) == len(requests), here.events[-1]
    deltas = here.of(TextDelta)
    return [Said("".join(d.text for d in deltas if d.request_id == n), finished[n]) for n in sorted(finished)]


REQUESTS = {
    "repeats": request("a b c a b c a b c"),
    "sampled": request("hello hello hello", sampling=Sampling(temperature=0.7, seed=3)),
    "grammar": request("numbers", grammar=GRAMMAR),
    "plain": request("one without drafts", PLAIN),
    "long": request("the inner line there " * 30),
    "penalty": request("a b c a b c", sampling=Sampling(temperature=0.0, repeat_penalty=1.1)),
}


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {}),
        ("llama", {"type_k": "q8_0", "type_v": "q8_0"}),
        ("llama", {"n_batch": 64, "n_ubatch": 64}),  # more rows than one pass has
        ("gemma3", {}),  # windows
    ],
    ids=["F16", "Q8_0", "rows", "windows"],
)
def test_drafts_beside_others_change_no_text(
    here: Chat, tmp_path: Path, arch: Architecture, options: dict[str, object]
) -> None:
    open_lanes(here, tmp_path, arch, **options)
    expected = {name: alone(here, one).outcome for name, one in REQUESTS.items()}
    for names in (("repeats", "sampled", "grammar", "plain"), ("plain", "repeats", "long", "penalty")):
        said = dict(zip(names, at_once(here, *(REQUESTS[name] for name in names)), strict=True))
        assert {name: one.outcome for name, one in said.items()} == {name: expected[name] for name in names}
        assert said["repeats"].drafted > 0 == said["plain"].drafted


def test_a_stop_in_a_draft_ends_that_answer_alone(here: Chat, tmp_path: Path) -> None:
    open_lanes(here, tmp_path)
    whole = alone(here, REQUESTS["repeats"])
    stop = whole.text[-12:-9]  # where the text has repeated itself for long
    stopped = msgspec.structs.replace(REQUESTS["repeats"], stop=(stop,))
    expected = alone(here, stopped)
    said = at_once(here, REQUESTS["repeats"], stopped, REQUESTS["grammar"])
    assert [said[0].outcome, said[1].outcome] == [whole.outcome, expected.outcome]
    assert said[1].finished.stop_reason == "stop_string"


def test_one_is_cancelled_and_goes_on_later(here: Chat, tmp_path: Path) -> None:
    open_lanes(here, tmp_path)
    expected = [alone(here, REQUESTS[name]).outcome for name in ("repeats", "sampled")]
    endless = msgspec.structs.replace(REQUESTS["repeats"], max_tokens=0, ignore_eos=True)

    def react(event: Event) -> None:
        if isinstance(event, TextDelta) and event.request_id == 1:
            here.engine.cancel()

    here.react = react
    said = at_once(here, endless, REQUESTS["sampled"])
    assert said[0].finished.stop_reason == "cancelled" and said[1].outcome == expected[1]
    here.react = lambda _: None
    assert [one.outcome for one in at_once(here, REQUESTS["repeats"], REQUESTS["sampled"])] == expected


def test_a_draft_ends_with_the_context(here: Chat, tmp_path: Path) -> None:
    open_lanes(here, tmp_path, n_ctx=256)
    full = [request(f"{'a b c ' * n}", max_tokens=0, ignore_eos=True) for n in (3, 9, 5)]
    expected = [alone(here, one).outcome for one in full]
    said = at_once(here, *full)
    assert [one.outcome for one in said] == expected
    assert {one.finished.stop_reason for one in said} == {"context"} and said[1].drafted > 0


@pytest.mark.parametrize("depth", [0, 3])
def test_what_others_share_counts_and_tells_nothing_of_costs(here: Chat, tmp_path: Path, depth: int) -> None:
    open_lanes(here, tmp_path)
    one = msgspec.structs.replace(REQUESTS["repeats"], speculation=Speculation(drafters=("suffix",), depth=depth))
    _, said = at_once(here, REQUESTS["plain"], one)
    figures = said.finished.timings.speculation
    assert {one.figures().plain_ms for one in here.loaded.beside} == {COSTS.verify_ms[0]}
    assert figures is not None and figures.off is None
    assert figures.draft_n >= figures.draft_n_accepted == said.drafted > 0
    assert said.finished.timings.predicted_n - 1 <= figures.passes + figures.draft_n_accepted
    assert len(figures.by_position) == 3 if depth else len(figures.by_position) > 3


def test_without_a_calibration_nothing_is_drafted_beside_others(here: Chat, tmp_path: Path) -> None:
    open_lanes(here, tmp_path, calibrate=False)
    said = at_once(here, REQUESTS["repeats"], REQUESTS["plain"])
    assert [one.finished.timings.draft_n for one in said] == [0, 0]


def test_what_another_lane_drafted_and_dropped_is_not_copied(
    here: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_lanes(here, tmp_path)
    lane, other = here.loaded.lanes[:2]
    key, tokens = StateKey(owner="me", chat=""), list(range(70, 130))
    prompt = RenderedPrompt(b"".join(map(lane.piece, tokens)), tokens)
    lane.begin(prompt, key)
    lane.sequence.extend(tokens)
    leave = StateStore.leave

    def leave_late(store: StateStore, *given: Any, **named: Any) -> None:
        leave(store, *given, **named)
        if store is other and store.live.key.owner:  # it has chosen to copy: the lane goes on with something else
            lane.sequence.truncate(20)
            lane.sequence.extend(tokens[:50])

    monkeypatch.setattr(StateStore, "leave", leave_late)
    other.begin(prompt, key)
    held = other.sequence.tokens
    assert held == tokens[: len(held)]
