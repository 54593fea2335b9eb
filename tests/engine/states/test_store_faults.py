"""Tests what the store does when something goes wrong, or comes from somebody else."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from cpuchat.base import paths
from cpuchat.base.errors import GenerationFailed
from cpuchat.base.paths import kv_stem
from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.states.prompt import RenderedPrompt
from cpuchat.engine.states.store import StateStore
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import LoadModel, Measure, Measured, Message, Speculation
from tests.engine.conftest import OPTIONS
from tests.support.cores import ONE_CPU
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
    assert chat.engine._loaded is not None
    return chat.engine._loaded.states


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


@pytest.fixture
def pair(chat: Chat, tmp_path: Path) -> Chat:
    """A chat with the demo model and its draft model, whose states are saved."""
    load_pair(chat, tmp_path)
    return chat


def load_pair(chat: Chat, folder: Path) -> None:
    demo, draft = (paths.demo_dir() / DEMO_FILES[name] for name in ("demo", "demo-draft"))
    chat.load(demo, msgspec.structs.replace(WIDE, draft_path=str(draft)), state_dir=folder / "kv")


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
    assert {one.key.chat for one in store_of(attention)._states} == {kv_stem("a"), kv_stem("b")}


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
    speculator, sequence = chat.engine._loaded.speculator, sequence_of(chat)  # type: ignore[union-attr]
    start_verify, flag = speculator.start_verify, sequence.abort

    def stop_within(proposal: object) -> None:
        sequence.abort = StopsWithin()
        start_verify(proposal)  # type: ignore[arg-type]

    speculator.start_verify = stop_within  # type: ignore[method-assign,assignment]
    asked = user(LONG + "a" * 60)
    stopped = chat.ask(asked, speculation=Speculation(drafters=("lookup",), depth=4), chat_id="a")
    assert chat.stop_reason == "cancelled"
    said = chat.text
    speculator.start_verify, sequence.abort = start_verify, flag  # type: ignore[method-assign]
    following = (asked, assistant(said), user("And?"))
    assert said and chat.ask(*following, chat_id="a").cache_n == stopped.n_past > 90


def test_a_stop_while_the_draft_models_state_is_read_changes_nothing(pair: Chat, tmp_path: Path) -> None:
    speculation = Speculation(drafters=("draft",), depth=3)
    question = user("Why does a CPU write slower than it reads the prompt?")
    pair.ask(question, chat_id="a", speculation=speculation)
    turns = (question, assistant(pair.text), user("And then?"))
    pair.restart()
    load_pair(pair, tmp_path)
    pair.ask(OTHER, chat_id="b")
    store = store_of(pair)
    loaded, held = store._loaded, list(store.sequence.tokens)

    def stop_at_draft(state: object) -> object:
        if any(state is one.draft for one in store._states):
            pair.engine.cancel()
        return loaded(state)  # type: ignore[arg-type]

    store._loaded = stop_at_draft  # type: ignore[method-assign,assignment]
    pair.request(messages=turns, chat_id="a", speculation=speculation)
    assert pair.stop_reason == "cancelled"
    assert (store.live.key.chat, store.sequence.tokens) == (kv_stem("b"), held)


def test_a_chat_is_saved_when_a_request_without_a_name_takes_its_place(hybrid: Chat, files: dict[str, Path]) -> None:
    """As measurements of the decode speed between two loads."""
    n_past = hybrid.ask(user(LONG), chat_id="a").n_past
    turns = (user(LONG), assistant(hybrid.text), user("And then?"))
    hybrid.request(prompt="Something else. " * 5)
    folder = store_of(hybrid)._files._folder  # type: ignore[union-attr]
    hybrid.load(files["qwen35"], WIDE, state_dir=folder)
    assert hybrid.ask(*turns, chat_id="a").cache_n == n_past


def test_an_emptied_memory_is_not_saved_over_the_chat(hybrid: Chat) -> None:
    hybrid.ask(user(LONG), chat_id="a")
    files = store_of(hybrid)._files
    for _ in range(2):
        hybrid.engine.idle()
        hybrid.engine._writer.finish()
        assert files is not None and [len(index.tokens) > 200 for _, index in files.indexes()] == [True]
        store_of(hybrid)._states.clear()
        sequence_of(hybrid).is_broken = True  # a stopped batch, and no checkpoint to go back to


def test_a_failed_partial_state_does_not_cost_the_whole_one(hybrid: Chat) -> None:
    turns: list[Message] = []
    for number in range(4):
        turns.append(user(f"{number}: {LONG}"))
        hybrid.ask(*turns, chat_id="a")
        turns.append(assistant(hybrid.text))
    hybrid.ask(OTHER, chat_id="b")
    store = store_of(hybrid)
    (whole,) = (one for one in store._states if one.is_whole and one.key.chat == kv_stem("a"))
    last = max((one for one in store._states if not one.is_whole and one.key.chat == kv_stem("a")), key=len)
    assert last.data is not None
    last.data = last.data[:-8]  # llama.cpp rejects it
    timings = hybrid.ask(*turns[:-1], chat_id="a")
    assert whole in store._states and last not in store._states
    assert timings.cache_n > 100


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


def test_unnamed_conversations_keep_their_own_names(chat: Chat, files: dict[str, Path]) -> None:
    """With a state that is always copied whole: the checkpoint is of the one that is continued, not of the last one."""
    chat.load(files["mamba"], WIDE)
    chat.ask(user(LONG), owner="one")
    first = store_of(chat).live.key.chat
    chat.ask(OTHER, owner="one")
    assert store_of(chat).live.key.chat != first
    chat.ask(user(LONG), assistant("Otherwise."), user("And then?"), owner="one")
    assert store_of(chat).live.key.chat == first


def test_a_lower_limit_holds_from_the_next_load_on(hybrid: Chat, files: dict[str, Path], tmp_path: Path) -> None:
    hybrid.ask(user(LONG), chat_id="a")
    hybrid.restart()
    assert list((tmp_path / "kv").iterdir())
    folder = tmp_path / "kv"
    hybrid.engine.load(
        LoadModel(path=str(files["qwen35"]), cpus=ONE_CPU, options=WIDE, state_dir=str(folder), state_limit=0)
    )
    assert hybrid.ask(user(LONG), chat_id="a").cache_n == 0
    assert not list((tmp_path / "kv").iterdir())


def test_places_of_many_messages_that_the_template_changes_are_found_in_time() -> None:
    """Each content is looked for in what may hold it, not in all that follows."""
    n = 20_000
    messages = tuple(user(f"question {i}") if i % 2 == 0 else assistant(f"{i} said") for i in range(n))
    rendered = (m.content.upper() if m.role == "assistant" else m.content for m in messages)
    text = "".join(f"<{content}>\n" for content in rendered).encode()
    prompt = RenderedPrompt(text, list(text), messages)
    contents = prompt._contents(text)
    assert contents[-2] == (text.rindex(b"question"), text.rindex(b"question") + len(f"question {n - 2}"))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(contents))
