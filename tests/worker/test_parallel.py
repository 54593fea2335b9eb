"""Tests the real worker writing several answers at once: each is what it would have been alone."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from cpuchat.backend.local import LocalBackend
from cpuchat.engine.llama.bindings import llama
from cpuchat.engine.states.files import StateFiles
from cpuchat.protocol.messages import (
    AUTO_PARALLEL,
    AnyEvent,
    Event,
    Generate,
    GenerationFinished,
    PrefillProgress,
    Sampling,
    Speculation,
    StateKey,
    TextDelta,
)
from tests.support.chatting import Answer, chat, collect, load, worker
from tests.support.engine_chat import OPTIONS, Chat, user
from tests.support.tiny_gguf import Architecture, write_tiny_gguf
from tests.worker.conftest import started

LONG = "the inner line there " * 60
GRAMMAR = 'root ::= "[" item ("," item)* "]"\nitem ::= "1" | "22" | "333"'

REQUESTS: dict[str, Generate] = {
    "greedy": chat("hello", max_tokens=80),
    "sampled": chat("hello", max_tokens=80, sampling=Sampling(temperature=1.0, seed=3)),
    "another seed": chat("hello", max_tokens=80, sampling=Sampling(temperature=1.0, seed=4, repeat_penalty=1.2)),
    "long": chat(LONG, max_tokens=40),
    "grammar": chat("numbers", max_tokens=40, grammar=GRAMMAR),
    "stops": chat("hello there", max_tokens=120, stop=("e", "zz")),
    "text": Generate(prompt="abc def", sampling=Sampling(temperature=0.0), max_tokens=60),
    "drafted": chat("a b c a b c a b c", max_tokens=60),
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(shared: LocalBackend) -> dict[str, Answer]:
    """The answers of a worker that writes one after the other."""
    return {name: await collect(shared.generate(request)) for name, request in REQUESTS.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def four(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalBackend]:
    async with started(tmp_path_factory.mktemp("four")) as backend:
        model = await load(backend, tiny_model, parallel=4, n_ctx=16384)  # that nothing endless ends by itself
        assert model.parallel == 4
        yield backend


def outcome(answer: Answer) -> tuple[str, str, int]:
    return answer.text, answer.finished.stop_reason, answer.timings.predicted_n


async def test_answers_at_once_are_those_alone_and_more_than_fit_wait(
    four: LocalBackend, alone: dict[str, Answer]
) -> None:
    for _ in range(2):  # the second time from what the lanes hold
        answers = await asyncio.gather(*(collect(four.generate(one)) for one in REQUESTS.values()))
        for (name, before), answer in zip(alone.items(), answers, strict=True):
            assert outcome(answer) == outcome(before), name
    again = await collect(four.generate(REQUESTS["long"]))
    assert outcome(again) == outcome(alone["long"])
    assert again.timings.cache_n > 0


async def until(events: AsyncGenerator[AnyEvent, None], kind: type) -> AnyEvent:
    async for event in events:
        if isinstance(event, kind):
            return event
    raise AssertionError(f"there was no {kind.__name__}")


async def test_one_that_is_left_early_ends_alone_and_others_join_and_go_on(
    four: LocalBackend, alone: dict[str, Answer]
) -> None:
    endless = four.generate(chat("hello", max_tokens=0, ignore_eos=True))
    await until(endless, TextDelta)
    joined = [asyncio.create_task(collect(four.generate(REQUESTS[name]))) for name in ("long", "sampled", "grammar")]
    reading = four.generate(chat(f"something else {LONG * 2}", max_tokens=0, ignore_eos=True))
    await until(reading, PrefillProgress)
    await reading.aclose()
    for task, name in zip(joined, ("long", "sampled", "grammar"), strict=True):
        assert outcome(await task) == outcome(alone[name])
    await until(endless, TextDelta)
    await endless.aclose()
    assert outcome(await collect(four.generate(REQUESTS["greedy"]))) == outcome(alone["greedy"])


async def test_one_that_waits_ends_at_once_when_it_is_cancelled(four: LocalBackend) -> None:
    endless = [four.generate(chat(f"endless {i}", max_tokens=0, ignore_eos=True)) for i in range(4)]
    for one in endless:
        await until(one, TextDelta)
    waiting = asyncio.create_task(collect(four.generate(chat("waits for a lane"))))
    for _ in range(10):  # queued texts of others let no task begin
        await asyncio.sleep(0)
    await until(endless[0], TextDelta)
    await four.cancel()
    assert (await waiting).finished.stop_reason == "cancelled"
    for one in endless:  # they go on
        await until(one, TextDelta)
        await one.aclose()


async def test_a_failure_of_one_leaves_the_others(four: LocalBackend, alone: dict[str, Answer]) -> None:
    broken = chat("hello", max_tokens=40, grammar='root ::= "unclosed')
    too_long = chat("x " * 20_000, when_full="refuse")
    answers = await asyncio.gather(
        *(collect(four.generate(one)) for one in (REQUESTS["greedy"], broken, too_long, REQUESTS["sampled"]))
    )
    assert outcome(answers[0]) == outcome(alone["greedy"])
    assert answers[1].failed.code and answers[2].failed.code == "context_full"
    assert outcome(answers[3]) == outcome(alone["sampled"])


async def test_chats_are_edited_and_continued_at_once(four: LocalBackend, shared: LocalBackend) -> None:
    async def talk(backend: LocalBackend, name: str) -> list[str]:
        state, texts = StateKey(chat=name, owner=name), []
        first = await collect(backend.generate(chat(f"{name} {LONG}", state=state)))
        for more in ((first.text, "and then?"), (first.text, "and why?"), ()):
            texts.append((await collect(backend.generate(chat(f"{name} {LONG}", *more, state=state)))).text)
        return texts

    names = ("ann", "bob", "cleo", "dan", "eve")
    expected = [await talk(shared, name) for name in names]
    assert await asyncio.gather(*(talk(four, name) for name in names)) == expected


async def test_what_prompts_begin_with_is_waited_for_and_copied(tmp_path: Path, other: LocalBackend) -> None:
    await load(other, write_tiny_gguf(tmp_path / "model.gguf"), parallel=3)
    head = f"instructions {LONG * 3}"
    answers = await asyncio.gather(*(collect(other.generate(chat(f"{head} task {i}"))) for i in range(3)))
    evaluated = [one.timings.prompt_n for one in answers]
    # The one on the engine's thread does not wait for others: it may read it too.
    assert sum(evaluated) < 2.3 * max(evaluated), evaluated
    for i, answer in enumerate(answers):
        assert outcome(await collect(other.generate(chat(f"{head} task {i}")))) == outcome(answer)


async def test_tokens_are_counted_and_a_chat_is_forgotten_beside_answers(four: LocalBackend) -> None:
    endless = four.generate(chat("hello", max_tokens=0, ignore_eos=True))
    await until(endless, TextDelta)
    assert await four.count_tokens(chat("how many?"))
    forgetting = four.forget("some chat")
    await until(endless, TextDelta)
    await endless.aclose()
    await forgetting
    assert (await collect(four.generate(chat("hello")))).finished.stop_reason == "max_tokens"


async def test_a_shutdown_ends_all_and_saves(tiny_model: Path, tmp_path: Path) -> None:
    async with worker(tiny_model, state_dir=tmp_path, parallel=3) as backend:
        streams = [backend.generate(chat(f"{name} {LONG}", max_tokens=0, state=StateKey(chat=name))) for name in "abcd"]
        for one in streams[:3]:
            await until(one, TextDelta)
        waiting = asyncio.create_task(collect(streams[3]))
        await until(streams[0], TextDelta)
        await backend.close()
        for answer in (*(await asyncio.gather(*(collect(one) for one in streams[:3]))), await waiting):
            assert answer.events
    assert len(list(tmp_path.glob("*.kv"))) >= 3
    async with worker(tiny_model, state_dir=tmp_path, parallel=3) as backend:
        again = await collect(backend.generate(chat(f"b {LONG}", state=StateKey(chat="b"))))
        assert again.timings.cache_n > 100


@pytest.mark.parametrize(("arch", "parallel"), [("llama", 3), ("gemma3", 3), ("qwen35", 1), ("mamba", 1)])
async def test_what_cannot_share_passes_says_so(
    arch: Architecture, parallel: int, tmp_path: Path, other: LocalBackend
) -> None:
    path = write_tiny_gguf(tmp_path / f"{arch}.gguf", arch=arch)
    await load(other, path, n_ctx=1024)
    requests = [chat(f"{i} {LONG}", max_tokens=40) for i in range(3)]
    alone = [outcome(await collect(other.generate(one))) for one in requests]
    model = await load(other, path, n_ctx=1024, parallel=3)
    assert model.parallel == parallel
    assert any("One answer at a time" in note for note in model.notes) == (parallel == 1)
    answers = await asyncio.gather(*(collect(other.generate(one)) for one in requests))
    assert [outcome(one) for one in answers] == alone


async def test_as_many_as_fit_are_chosen(tiny_model: Path, other: LocalBackend) -> None:
    assert (await load(other, tiny_model, parallel=0)).parallel == AUTO_PARALLEL


GREEDY, PLAIN = Sampling(temperature=0.0), Speculation(drafters=())


def asked(request_id: int, text: str, max_tokens: int, **more: Any) -> Generate:
    messages = (user(text),)
    return Generate(request_id=request_id, messages=messages, sampling=GREEDY, max_tokens=max_tokens, **more)


def two_lanes(here: Chat, path: Path, **options: object) -> None:
    changed = {"parallel": 2, "n_ctx": 1024, **options}
    here.load(path, msgspec.structs.replace(OPTIONS, **changed), path.parent / "kv")


async def test_rows_are_not_read_where_another_lane_has_moved_them(here: Chat, tmp_path: Path) -> None:
    two_lanes(here, write_tiny_gguf(tmp_path / "model.gguf", gain=3.0))
    texts = []
    for words, owner, speculation in (
        ("hello there you", "a", PLAIN),
        ("a b c " * 6, "b", Speculation(drafters=("suffix",), depth=16)),
        ("hello there you", "a", PLAIN),
    ):
        here.ask(user(words), owner=owner, sampling=GREEDY, max_tokens=40, speculation=speculation)
        texts.append(here.text)
    assert texts[0] == texts[2]


async def test_an_answer_beside_leaves_the_draft_model_to_the_other(here: Chat, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", gain=3.0)
    draft = shutil.copy(path, tmp_path / "draft.gguf")
    two_lanes(here, path, n_ctx=4096, draft_path=str(draft))
    drafting = Speculation(drafters=("draft",), depth=4)
    here.ask(user("A engine please " * 60), chat_id="A", sampling=GREEDY, max_tokens=5, speculation=PLAIN)
    here.ask(user("B engine please " * 20), chat_id="B", sampling=GREEDY, max_tokens=60, speculation=drafting)
    beside = asked(501, "B engine please " * 20 + "more", 3, state=StateKey(chat="B"))

    def write_beside() -> None:
        here.engine.generate_beside(beside, perf_counter())
        here.engine.end_beside(501)

    thread = threading.Thread(target=write_beside)

    def react(event: Event) -> None:
        if isinstance(event, TextDelta) and not thread.ident:
            here.engine.begin_beside(501)
            thread.start()

    here.react = react
    here.events.clear()
    here.engine.generate(asked(500, "C engine please " * 20, 300, state=StateKey(chat="C"), speculation=drafting))
    here.engine.run_beside()
    thread.join()
    finished = {one.request_id: one.timings for one in here.of(GenerationFinished)}
    assert finished.keys() == {500, 501}, here.events
    assert finished[501].reuse.source == "memory", "the state has a part of the draft model"
    assert finished[500].draft_n_accepted == finished[500].draft_n > 100


async def test_all_lanes_are_saved_when_idle_and_after_an_answer_beside(here: Chat, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    two_lanes(here, path)
    for name in ("one", "two"):
        here.ask(user(f"{name} {LONG[:300]}"), chat_id=name, keeps=True)
    here.engine.idle()
    here.settle()
    assert len(list((tmp_path / "kv").glob("*.kv"))) == 2
    here.engine.begin_beside(99)  # it ends after the other answer, but before `run_beside`
    here.ask(user("hello"))
    here.engine.end_beside(99)
    here.engine.run_beside()
    assert here.engine._writer._engine_idle.is_set()


async def test_others_are_written_while_the_engines_thread_waits_for_a_saved_state(
    here: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, question = write_tiny_gguf(tmp_path / "model.gguf"), f"one {LONG[:300]}"
    two_lanes(here, path)
    here.ask(user(question), chat_id="one", owner="a", keeps=True)
    here.restart()
    two_lanes(here, path)
    other = asked(99, "hello", 8)
    thread, read = threading.Thread(target=lambda: here.engine.generate_beside(other, perf_counter())), StateFiles.read

    def read_slowly(*given: Any) -> Any:
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "the other answer waits for the disk"
        here.engine.end_beside(99)
        return read(*given)

    monkeypatch.setattr(StateFiles, "read", read_slowly)  # no disk is slow at will
    here.engine.begin_beside(99)
    here.engine.generate(asked(1, question, 2, state=StateKey(owner="a", chat="one", on_disk=True)))
    finished = {one.request_id: one.timings for one in here.of(GenerationFinished)}
    assert finished[99].predicted_n == 8
    assert finished[1].reuse.source == "disk"


async def test_an_answer_on_the_engines_thread_that_is_stopped_beside_others_ends(here: Chat, tmp_path: Path) -> None:
    two_lanes(here, write_tiny_gguf(tmp_path / "model.gguf"))
    here.engine.begin_beside(99)  # one that leaves no tokens to evaluate
    here.react = lambda event: here.engine.cancel() if isinstance(event, TextDelta) else None
    here.ask(user("hello"), max_tokens=0, ignore_eos=True)
    assert here.of(GenerationFinished)[-1].stop_reason == "cancelled"
    here.engine.end_beside(99)


async def test_lanes_compute_on_the_same_threads(here: Chat, tmp_path: Path) -> None:
    two_lanes(here, write_tiny_gguf(tmp_path / "model.gguf"), parallel=4, n_batch=32)
    model = here.loaded.model
    pool, passes = model.pool, model.passes
    first, last = passes.lanes[0], passes.lanes[-1]
    pool._next_look, before = float("inf"), pool.threads
    for lane in (first, last):
        lane.step(65)
    pool.n_active, pool.threads = 2, pool._start(2)
    first.step(66)
    pool.n_active, pool.threads = 1, before
    last.step(66)
    assert llama.llama_n_threads(last.context) == 1
