"""The whole engine: commands in, events out, a real model between."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from cpuchat import paths
from cpuchat.engine.engine import Engine
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.prompt.disk_writer import WriteBudget
from cpuchat.errors import GenerationFailed
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.protocol import (
    ContextTrimmed,
    Event,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    LoadModel,
    LoadOptions,
    LoadProgress,
    Message,
    ModelInfo,
    ModelLoaded,
    PrefillProgress,
    Sampling,
    TextDelta,
)
from cpuchat.timings import Timings
from tests.engine.conftest import OPTIONS
from tests.support.pairs import ONE_CPU
from tests.support.tiny_gguf import write_tiny_gguf

E = TypeVar("E", bound=Event)
SEEDED = Sampling(seed=11, temperature=1.0)


class Chat:
    """An engine and everything that it said. `react` may cancel in the middle of something."""

    def __init__(self, budget: WriteBudget | None = None) -> None:
        self.events: list[Event] = []
        self.react: Callable[[Event], None] = lambda _: None
        self.engine = Engine(self._emit, budget)
        self._requests = 0

    def restart(self) -> None:
        """Go on with another engine, as a new worker process would."""
        self.engine.close()
        self.engine = Engine(self._emit)

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.react(event)

    def of(self, kind: type[E]) -> list[E]:
        return [e for e in self.events if isinstance(e, kind)]

    def load(
        self,
        path: Path,
        options: LoadOptions = OPTIONS,
        state_dir: Path | None = None,
        cpus: tuple[int, ...] = ONE_CPU,
    ) -> ModelInfo:
        self.events.clear()
        self.engine.load(LoadModel(path=str(path), cpus=cpus, options=options, state_dir=str(state_dir or "")))
        loaded = self.events[-1]
        assert isinstance(loaded, ModelLoaded), loaded
        return loaded.model

    def ask(self, *messages: Message, **more: object) -> Timings:
        """Send a request that must finish; `events` are those of this request."""
        self.request(messages=messages, **more)
        finished = self.events[-1]
        assert isinstance(finished, GenerationFinished), finished
        return finished.timings

    def request(self, **fields: object) -> None:
        self.events.clear()
        self._requests += 1
        fields = {"sampling": SEEDED, "max_tokens": 24, **fields}
        self.engine.generate(Generate(request_id=self._requests, **fields))  # type: ignore[arg-type]
        assert {e.request_id for e in self.events} == {self._requests}  # type: ignore[attr-defined]
        self.engine.clear_cancel()

    @property
    def failure(self) -> Failed:
        failed = self.events[-1]
        assert isinstance(failed, Failed), failed
        return failed

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.of(TextDelta))

    @property
    def stop_reason(self) -> str:
        return self.of(GenerationFinished)[0].stop_reason


@pytest.fixture
def chat() -> Iterator[Chat]:
    chat = Chat()
    yield chat
    chat.engine.close()


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


LONG = "Tell me everything about the inference engine, in the order of the layers, please."


def test_load(chat: Chat, tiny_model: Path) -> None:
    info = chat.load(tiny_model)
    assert info.n_ctx == 512 and info.has_template
    assert chat.of(LoadProgress) and isinstance(chat.events[-1], ModelLoaded)


def test_failed_load(chat: Chat, tmp_path: Path) -> None:
    chat.engine.load(LoadModel(path=str(tmp_path / "none.gguf"), cpus=ONE_CPU))
    assert chat.failure.code == "model_not_found"
    chat.request(messages=(user("Hello"),))
    assert chat.failure.code == "usage" and "No model" in chat.failure.message


def test_cancelled_load(chat: Chat, tiny_model: Path) -> None:
    chat.react = lambda e: chat.engine.cancel() if isinstance(e, LoadProgress) else None
    chat.engine.load(LoadModel(path=str(tiny_model), cpus=ONE_CPU, options=OPTIONS))
    assert isinstance(chat.events[-1], LoadCancelled)
    chat.engine.clear_cancel()
    chat.react = lambda _: None
    chat.load(tiny_model)


def test_one_answer(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    timings = chat.ask(user("Hello"))
    assert chat.stop_reason == "max_tokens"
    prefill, deltas = chat.of(PrefillProgress), chat.of(TextDelta)
    assert (prefill[0].processed, prefill[-1].processed) == (0, prefill[-1].total)
    assert timings.prompt_n == prefill[-1].total and timings.cache_n == 0
    assert timings.predicted_n == 24 == sum(d.n_tokens for d in deltas)
    assert timings.n_past == timings.prompt_n + 23 and timings.n_ctx == 512
    assert timings.seed == 11
    assert timings.prompt_ms > 0 and timings.predicted_ms > 0 and timings.overhead_us > 0
    assert timings.ttft_ms >= timings.prompt_ms
    assert (timings.prompt_per_second or 0) > 0 and (timings.predicted_per_second or 0) > 0
    assert deltas[0].at_ms >= timings.ttft_ms
    assert [type(e) for e in chat.events[: len(prefill)]] == [PrefillProgress] * len(prefill)


def test_drawn_seed_is_reported_and_repeats(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    free = msgspec.structs.replace(SEEDED, seed=None)
    timings = chat.ask(user("Hello"), sampling=free)
    first = chat.text
    assert 0 <= timings.seed < 1 << 32
    assert chat.ask(user("Hello"), sampling=msgspec.structs.replace(free, seed=timings.seed)).cache_n > 0
    assert chat.text == first
    assert chat.ask(user("Hello"), sampling=free).seed != timings.seed


def test_next_turn_reuses_everything_that_was_said(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    turns: list[Message] = []
    n_past = 0
    for question in (LONG, "And then?", "Why is that so?", "Go on."):
        turns.append(user(question))
        timings = chat.ask(*turns)
        assert timings.cache_n == n_past
        # New are the last token of the answer, the end of its turn, and the question.
        marks = "<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
        assert timings.prompt_n < len(question) + len(marks)
        turns.append(assistant(chat.text))
        n_past = timings.n_past


def test_answer_trimmed_by_the_interface_still_reuses(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    first = chat.ask(user(LONG))
    cut = chat.text[:-3]
    second = chat.ask(user(LONG), assistant(cut), user("And?"))
    assert second.cache_n >= first.n_past - 4


def test_edit_keeps_what_comes_before(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    first = chat.ask(user(LONG))
    answer = assistant(chat.text)
    chat.ask(user(LONG), answer, user("And then?"))
    edited = chat.ask(user(LONG), answer, user("Or rather?"))
    assert edited.cache_n >= first.n_past
    assert chat.ask(user(LONG.replace("layers", "tokens")), answer, user("Hm?")).cache_n < len(LONG)


def test_regenerating_takes_the_prompt_from_the_cache(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    first = chat.ask(user(LONG))
    text = chat.text
    again = chat.ask(user(LONG))
    assert chat.text == text
    assert (again.cache_n, again.prompt_n, again.prompt_per_second) == (first.prompt_n, 0, None)


def test_restart_goes_on_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    first = Chat()
    first.load(tiny_model, state_dir=tmp_path / "kv")
    before = first.ask(user(LONG), chat_id="a")
    turns = (user(LONG), assistant(first.text), user("And then?"))
    first.engine.close()

    second = Chat()
    second.load(tiny_model, state_dir=tmp_path / "kv")
    after = second.ask(*turns, chat_id="a")
    restored = second.text
    assert after.cache_n == before.n_past
    second.engine.close()

    unbroken = Chat()
    unbroken.load(tiny_model)
    unbroken.ask(user(LONG))
    assert unbroken.ask(*turns).cache_n == before.n_past
    assert unbroken.text == restored
    unbroken.engine.close()


def test_changing_chats_brings_each_back(chat: Chat, tiny_model: Path, tmp_path: Path) -> None:
    chat.load(tiny_model, state_dir=tmp_path / "kv")
    one = chat.ask(user(LONG), chat_id="one")
    turns = (user(LONG), assistant(chat.text), user("And then?"))
    assert chat.ask(user("Something else entirely " * 5), chat_id="two").cache_n < 30
    assert chat.ask(*turns, chat_id="one").cache_n == one.n_past


def test_a_refused_prompt_does_not_save_one_chat_as_another(
    chat: Chat, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kv"
    chat.load(tiny_model, state_dir=folder)
    chat.ask(user("The secret of the first chat. " * 4), chat_id="first")

    def refuse(*_: object, **__: object) -> None:
        raise GenerationFailed("llama.cpp could not evaluate the text: refused.")

    with monkeypatch.context() as refusing:
        refusing.setattr(Sequence, "extend", refuse)
        chat.request(messages=(user("Something else"),), chat_id="second")
        assert chat.failure.code == "generation_failed"
    chat.engine.idle()
    chat.engine.close()
    (text,) = folder.glob("*.text")
    assert text.name.startswith(paths.kv_stem("first"))


def test_damaged_saved_state_only_costs_time(chat: Chat, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    chat.load(tiny_model, state_dir=folder)
    chat.ask(user(LONG), chat_id="a")
    chat.restart()
    state = next(folder.glob("*.kv"))
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 4
    state.write_bytes(data)
    chat.load(tiny_model, state_dir=folder)
    assert chat.ask(user(LONG), chat_id="a").cache_n == 0
    assert list(folder.iterdir()) == []


def test_state_is_not_shared_between_cache_types(chat: Chat, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    chat.load(tiny_model, state_dir=folder)
    chat.ask(user(LONG), chat_id="a")
    chat.load(tiny_model, msgspec.structs.replace(OPTIONS, type_k="f32", type_v="f32"), state_dir=folder)
    assert chat.ask(user(LONG), chat_id="a").cache_n == 0
    # Another context size is no reason to start over.
    chat.load(tiny_model, msgspec.structs.replace(OPTIONS, n_ctx=1024), state_dir=folder)
    assert chat.ask(user(LONG), chat_id="a").cache_n > len(LONG) // 2


def test_cancel_in_prefill(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    chat.react = lambda e: chat.engine.cancel() if isinstance(e, PrefillProgress) and e.processed >= 64 else None
    timings = chat.ask(user(LONG * 3))
    assert chat.stop_reason == "cancelled" and chat.text == ""
    assert (timings.prompt_n, timings.predicted_n, timings.n_past) == (64, 0, 64)
    chat.react = lambda _: None
    assert chat.ask(user(LONG * 3)).cache_n == 64


def test_cancel_in_the_answer(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    chat.react = lambda e: chat.engine.cancel() if isinstance(e, TextDelta) else None
    timings = chat.ask(user(LONG), max_tokens=0)
    assert chat.stop_reason == "cancelled"
    assert chat.text and timings.predicted_n == sum(d.n_tokens for d in chat.of(TextDelta))
    chat.react = lambda _: None
    said = chat.text
    assert chat.ask(user(LONG), assistant(said), user("Go on")).cache_n == timings.n_past


def test_long_chat_is_trimmed_and_told(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    turns = [m for i in range(8) for m in (user(f"{i} {LONG}"), assistant(f"Answer {i}"))]
    chat.ask(Message(role="system", content="Be brief."), *turns, user("Last one"))
    (trimmed,) = chat.of(ContextTrimmed)
    assert isinstance(chat.events[0], ContextTrimmed)
    assert 0 < trimmed.dropped_messages < 17 and trimmed.dropped_tokens > 0 and trimmed.n_ctx == 512
    assert chat.of(PrefillProgress)[-1].total <= 512


def test_message_longer_than_the_context(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    chat.request(messages=(user("x y z " * 200),))
    assert chat.failure.code == "context_full"
    chat.request(prompt="x y z " * 200)
    assert chat.failure.code == "context_full" and "1,200" in chat.failure.message
    assert chat.ask(user("short")).predicted_n == 24


def test_answer_until_the_context_is_full(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    timings = chat.ask(user("Hello"), max_tokens=0)
    assert chat.stop_reason == "context"
    assert timings.n_past == 512


def test_raw_prompt(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    assert chat.ask(prompt="abc").prompt_n == 3
    first = chat.text
    assert chat.ask(prompt="abc" + first + "!").prompt_n <= 2
    chat.request(prompt="")
    assert chat.failure.code == "usage"
    chat.request()
    assert chat.failure.code == "usage"


def test_model_without_template(chat: Chat, tiny_model_without_template: Path) -> None:
    info = chat.load(tiny_model_without_template)
    assert not info.has_template
    assert any("No chat template" in note for note in info.notes)
    timings = chat.ask(user("Hello"))
    assert timings.predicted_n == 24
    assert timings.prompt_n == len("User: Hello\nAssistant:") - 3  # "er", "ll" and "an" are tokens


def test_broken_template_fails_the_request_only(chat: Chat, tmp_path: Path) -> None:
    chat.load(write_tiny_gguf(tmp_path / "m.gguf", template="{{ messages[0]['content'] | no_such_filter }}"))
    chat.request(messages=(user("Hello"),))
    assert chat.failure.code == "template"
    assert chat.ask(prompt="Hello").predicted_n == 24


def test_stop_strings(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    chat.ask(user("Hello"), max_tokens=60)
    whole = chat.text
    stop = whole[10:13]
    chat.ask(user("Hello"), max_tokens=60, stop=(stop,))
    assert chat.stop_reason == "stop_string"
    assert chat.text == whole[: whole.index(stop)]


def test_wrong_sampling_is_refused(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    chat.request(messages=(user("Hello"),), sampling=Sampling(temperature=-1.0))
    assert chat.failure.code == "usage" and "temperature" in chat.failure.message
    assert chat.ask(user("Hello")).predicted_n == 24


def test_closing_and_another_model(chat: Chat, tiny_model: Path, recurrent_model: Path) -> None:
    chat.load(tiny_model)
    chat.restart()
    chat.request(messages=(user("Hello"),))
    assert chat.failure.code == "usage"
    assert chat.load(recurrent_model).architecture == "mamba"
    chat.load(tiny_model)
    assert chat.ask(user("Hello")).cache_n == 0


def listed_threads(expected: int = 0) -> int:
    """Threads of this process by the kernel's list, where one that has ended may stand for a moment longer: with
    `expected`, it is read until there are no more than that, or a while is over."""
    deadline = time.monotonic() + 10
    while (n := len(list(Path("/proc/self/task").iterdir()))) > expected > 0 and time.monotonic() < deadline:
        os.sched_yield()
    return n


def test_nothing_is_left_behind(tiny_model: Path) -> None:
    python_threads = threading.active_count()
    chat = Chat()
    for _ in range(3):
        chat.load(tiny_model)
        chat.ask(user("Hello"))
    chat.engine.close()
    threads = listed_threads()
    chat = Chat()
    chat.load(tiny_model, cpus=own_cpus()[:2])
    chat.ask(user("Hello"))
    chat.engine.close()
    chat.engine.close()
    assert listed_threads(threads) <= threads
    assert threading.active_count() == python_threads


@pytest.mark.parametrize("path", sorted(paths.demo_dir().glob("*.gguf")), ids=lambda p: p.stem)
def test_demo_models(chat: Chat, path: Path, tmp_path: Path) -> None:
    """Several turns; the text depends neither on the cache nor on a restart in between."""
    info = chat.load(path, msgspec.structs.replace(OPTIONS, n_ctx=0), state_dir=tmp_path / "kv")
    assert info.has_template and info.notes == ()
    turns: list[Message] = []
    n_past = 0
    # The first one is long enough for its state to be worth loading again.
    for question in ("How do I stop an answer? " * 6, "What is the acceptance rate?", "Thank you."):
        turns.append(user(question))
        timings = chat.ask(*turns, max_tokens=60, chat_id="demo")
        assert timings.cache_n == n_past
        said = chat.text
        assert chat.ask(*turns, max_tokens=60, chat_id="demo").prompt_n == 0
        assert chat.text == said
        assert "<|" not in said
        turns.append(assistant(said))
        n_past = timings.n_past
        if len(turns) == 2:
            chat.load(path, msgspec.structs.replace(OPTIONS, n_ctx=0), state_dir=tmp_path / "kv")


def test_recurrent_model(chat: Chat, recurrent_model: Path, tmp_path: Path) -> None:
    chat.load(recurrent_model, state_dir=tmp_path / "kv")
    first = chat.ask(user(LONG), chat_id="a")
    turns = (user(LONG), assistant(chat.text), user("And then?"))
    assert chat.ask(*turns, chat_id="a").cache_n == first.n_past
    again = chat.text
    # Nothing before the end can be reused: the state has moved on.
    assert chat.ask(*turns, chat_id="a").cache_n == 0
    assert chat.text == again
    chat.load(recurrent_model, state_dir=tmp_path / "kv")
    longer = (*turns, assistant(again), user("Good."))
    assert chat.ask(*longer, chat_id="a").cache_n > first.n_past
    chat.react = lambda e: chat.engine.cancel() if isinstance(e, TextDelta) else None
    chat.ask(*longer, assistant(chat.text), user("More"), chat_id="a", max_tokens=0)
    assert chat.stop_reason == "cancelled"
    chat.react = lambda _: None
    assert chat.ask(*longer, assistant("x"), user("More"), chat_id="a").predicted_n == 24
