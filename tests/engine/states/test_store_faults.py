"""Tests what the store does when something goes wrong, or comes from somebody else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import GenerationFailed
from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.states.store import StateStore
from cpuchat.protocol.messages import Measure, Measured, Speculation
from cpuchat.speculation.drafters.drafter import Proposal
from tests.engine.conftest import OPTIONS
from tests.support.engine_chat import LONG, Chat, assistant, user
from tests.support.tiny_gguf import Architecture, write_tiny_gguf

WIDE = msgspec.structs.replace(OPTIONS, n_ctx=2048)
OTHER = user("Something else entirely, about hardware. " * 3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    kinds: tuple[Architecture, ...] = ("llama", "mamba", "qwen35")
    return {arch: write_tiny_gguf(folder / f"{arch}.gguf", arch=arch, n_layer=3) for arch in kinds}


def store_of(chat: Chat) -> StateStore:
    return chat.loaded.states


def sequence_of(chat: Chat) -> Sequence:
    return store_of(chat).sequence


@pytest.fixture
def attention(chat: Chat, files: dict[str, Path]) -> Chat:
    chat.load(files["llama"], WIDE)
    return chat


@pytest.fixture
def hybrid(chat: Chat, files: dict[str, Path], tmp_path: Path) -> Chat:
    chat.load(files["qwen35"], WIDE, state_dir=tmp_path / "kv")
    return chat


def test_a_measurement_starts_from_nothing(attention: Chat) -> None:
    """Benchmarks ask the same again: what an answer took from the one before would not be measured."""
    attention.ask(user(LONG))
    attention.ask(OTHER)
    attention.ask(user(LONG), chat_id="mine")
    attention.engine.forget("")
    assert attention.ask(OTHER).cache_n == 0
    assert attention.ask(user(LONG), chat_id="mine").cache_n < 30


def test_random_tokens_of_measurements_are_not_kept(attention: Chat) -> None:
    attention.ask(user(LONG), chat_id="a")
    for request_id in range(3):
        attention.engine.measure(Measure(request_id=request_id, n_prompt=32, n_gen=2, depth=200))
        assert isinstance(attention.events[-1], Measured)
    attention.ask(OTHER, chat_id="b")
    assert len(store_of(attention).histories("")) == 2  # of a and b


class StopsWithin(AbortFlag):
    """Stops the next batch when llama.cpp has asked for the tenth time, or before the batch after it."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes, self._batches = 10, 1
        self.callback = llama.ggml_abort_callback(self._asked)

    def is_set(self) -> bool:
        self._batches -= 1
        return self._batches < 0

    def _asked(self, _: object) -> bool:
        self._nodes -= 1
        return self._nodes < 0


def test_a_stop_within_a_draft_keeps_the_chat(chat: Chat, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "repeats.gguf", arch="qwen35", n_layer=3, likely="a")
    chat.load(file, WIDE)
    speculator, sequence = chat.loaded.speculator, sequence_of(chat)
    propose, flag = speculator.propose, sequence.abort

    def stop_within(written: list[int], room: int, **_: bool) -> Proposal | None:
        if proposal := propose(written, room):
            sequence.abort = StopsWithin()
            proposal.tokens[-1] += 1  # rejected, so that the others are evaluated again
        return proposal

    speculator.propose = stop_within  # type: ignore[method-assign]
    asked = user(LONG + "a" * 60)
    stopped = chat.ask(asked, speculation=Speculation(drafters=("suffix",), depth=4), chat_id="a")
    assert chat.stop_reason == "cancelled"
    said = chat.text
    speculator.propose, sequence.abort = propose, flag  # type: ignore[method-assign]
    following = (asked, assistant(said), user("And?"))
    assert said and chat.ask(*following, chat_id="a").cache_n == stopped.n_past > 90


def test_a_chat_is_saved_when_a_request_without_a_name_takes_its_place(
    hybrid: Chat, files: dict[str, Path], tmp_path: Path
) -> None:
    """As measurements of the decode speed between two loads."""
    n_past = hybrid.ask(user(LONG), chat_id="a").n_past
    turns = (user(LONG), assistant(hybrid.text), user("And then?"))
    hybrid.request(prompt="Something else. " * 5)
    hybrid.load(files["qwen35"], WIDE, state_dir=tmp_path / "kv")
    assert hybrid.ask(*turns, chat_id="a").cache_n == n_past


def test_a_failed_prompt_leaves_nothing_of_another_chat(attention: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    attention.ask(user(LONG), chat_id="a")
    fork = (user(LONG), assistant("No."), user("Why?"))
    with monkeypatch.context() as failing:

        def fail(*_: object, **__: object) -> None:
            raise GenerationFailed("llama.cpp failed.", "Retry.")

        failing.setattr(sequence_of(attention), "extend", fail)
        said = attention.text.encode()
        attention.request(messages=fork, chat_id="fork")
    assert attention.failure.code == "generation_failed"
    attention.engine.forget("a")
    assert said not in store_of(attention).live.history.text
