"""Tests the backend against a real llama-server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuchat import paths
from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.backend.remote.keys import KeyRing
from cpuchat.backend.switching import SwitchingBackend
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol import (
    ContextTrimmed,
    LoadOptions,
    Message,
    ModelLoaded,
    PrefillProgress,
    ServerLoad,
    TextDelta,
)
from cpuchat.servers import ServerModel
from cpuchat.telemetry.meter import Meter
from tests.support.chatting import GREEDY, Answer, chat, collect, load
from tests.support.llama_server import llama_server, slots

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("measured_machine")]
DEMO, DRAFT = (paths.demo_dir() / DEMO_FILES[name] for name in ("demo", "demo-draft"))
RATES = (0.8, 0.5, 0.2)


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with llama_server(DEMO) as url:
        yield url


@pytest.fixture(scope="module")
def drafting() -> Iterator[str]:
    with llama_server(DEMO, draft=DRAFT, depth=len(RATES), rates=RATES) as url:
        yield url


async def connected(url: str) -> RemoteBackend:
    backend = RemoteBackend()
    loaded = await collect(backend.load(ServerModel(url), LoadOptions()))
    assert isinstance(loaded.events[-1], ModelLoaded), loaded.events
    return backend


async def test_the_model_is_described(demo: str) -> None:
    backend = await connected(demo)
    model = backend.model
    assert model is not None
    assert model.name.startswith("cpuchat-demo-8m") and model.quantization == "Q8_0"
    assert model.n_ctx == 2048 and model.n_params > 7_000_000 and model.size > 7_000_000
    assert model.server == f"llama-server at {demo.removeprefix('http://')}"
    assert "--spec" in model.why_untold("acceptance")
    await backend.close()


async def test_it_answers_as_the_worker_does(demo: str) -> None:
    request = chat("What is cpuchat?", sampling=GREEDY, max_tokens=40)
    backend = SwitchingBackend()
    try:
        await load(backend, DEMO, n_ctx=2048)
        here = await collect(backend.generate(request))
        assert backend.pid is not None
        loaded = await collect(backend.load(ServerModel(demo), LoadOptions()))
        assert isinstance(loaded.events[-1], ModelLoaded) and backend.pid is None
        there = await collect(backend.generate(request))
        assert there.text == here.text
        assert there.timings.predicted_n - here.timings.predicted_n in (0, 1)  # it counts the token that ends the text
        assert there.timings.prompt_n + there.timings.cache_n == here.timings.prompt_n + here.timings.cache_n
        assert there.finished.stop_reason == here.finished.stop_reason
        await load(backend, DEMO, n_ctx=2048)
        assert (await collect(backend.generate(request))).text == here.text
    finally:
        await backend.close()


async def test_figures_are_the_servers(demo: str) -> None:
    backend, meter, told = await connected(demo), Meter(), []
    assert backend._adapter is not None
    original = backend._adapter.chunk

    def listening(data: dict) -> object:
        told.append(data.get("timings"))
        return original(data)

    backend._adapter.chunk = listening  # type: ignore[method-assign]
    assert backend.model is not None
    meter.observe(ModelLoaded(model=backend.model), 0.0)
    meter.request_started(time.monotonic())
    events = []
    async for event in backend.generate(chat("Tell me a story", max_tokens=64)):
        events.append(event)
        meter.observe(event, time.monotonic())
    got, last = Answer(events), [one for one in told if one][-1]
    figures = meter.figures()
    assert figures.decode_tok_s == pytest.approx(last["predicted_per_second"], rel=0.01)
    assert figures.prefill_tok_s == pytest.approx(last["prompt_per_second"], rel=0.01)
    assert got.timings.predicted_n == last["predicted_n"] and not figures.approximate
    assert figures.n_past == got.timings.n_past == last["cache_n"] + last["prompt_n"] + last["predicted_n"] - 1
    assert figures.n_ctx == 2048
    assert got.timings.network_ms is not None and got.timings.queue_ms is not None
    parts = got.timings.network_ms + got.timings.queue_ms + got.timings.prompt_ms
    assert parts == pytest.approx(got.timings.ttft_ms, abs=last["predicted_per_token_ms"] + 5)
    assert figures.server is not None and figures.server.running is not None
    assert got.of(PrefillProgress)[-1].processed == got.of(PrefillProgress)[-1].total
    await backend.close()


async def test_a_second_turn_reuses_the_first(demo: str) -> None:
    backend = await connected(demo)
    first = await collect(backend.generate(chat("What is a KV cache?")))
    second = await collect(backend.generate(chat("What is a KV cache?", first.text, "And why?")))
    assert second.timings.cache_n >= first.timings.prompt_n
    await backend.close()


async def test_stopping_frees_the_slot_and_keeps_the_text(demo: str) -> None:
    backend = await connected(demo)
    events = []
    async for event in backend.generate(chat("Tell me a story", max_tokens=0, ignore_eos=True)):
        events.append(event)
        if isinstance(event, TextDelta):
            await backend.cancel()
    got = Answer(events)
    assert got.finished.stop_reason == "cancelled" and got.text and got.finished.note == ""
    assert not any(slot["is_processing"] for slot in slots(demo))
    await backend.close()


async def test_two_answers_wait_for_each_other(demo: str) -> None:
    one, two = await connected(demo), await connected(demo)
    first = asyncio.create_task(collect(one.generate(chat("Tell me a story", max_tokens=200, ignore_eos=True))))
    second = asyncio.create_task(collect(two.generate(chat("What is RAM?", max_tokens=5, ignore_eos=True))))
    early, late = sorted((await first, await second), key=lambda got: got.timings.queue_ms or 0.0)
    assert (late.timings.queue_ms or 0.0) > (early.timings.queue_ms or 0.0)
    assert early.of(ServerLoad)
    await one.close()
    await two.close()


async def test_forced_acceptance_is_shown(drafting: str) -> None:
    backend = await connected(drafting)
    assert backend.model is not None and backend.model.why_untold("acceptance") == ""
    got = await collect(backend.generate(chat("Tell me a story", max_tokens=600, ignore_eos=True)))
    timings = got.timings
    assert timings.draft_n > 100
    figures = timings.speculation
    assert figures is not None and figures.source == "server"
    # Synthetic rates accept the first, second, third token with these conditional probabilities.
    wanted = sum(RATES) / len(RATES)
    assert timings.draft_n_accepted / timings.draft_n == pytest.approx(wanted, abs=0.1)
    assert timings.tokens_per_pass == pytest.approx(1 + timings.draft_n_accepted / figures.passes, abs=0.01)
    await backend.close()


async def test_a_chat_that_outgrows_the_context_is_trimmed(demo: str) -> None:
    backend = await connected(demo)
    texts = [f"{n} " + "word " * 300 for n in range(9)]
    got = await collect(backend.generate(chat(*texts, max_tokens=5)))
    assert got.of(ContextTrimmed)[0].n_ctx == 2048
    assert got.timings.predicted_n == 5
    too_long = await collect(backend.generate(chat("word " * 5000)))
    assert too_long.failed.code == "context_full"
    await backend.close()


async def test_a_plain_prompt_is_continued(demo: str) -> None:
    backend = await connected(demo)
    request = chat(max_tokens=8, prompt="Once upon a time", messages=())
    got = await collect(backend.generate(request))
    assert got.text and got.timings.predicted_n <= 8
    await backend.close()


async def test_a_system_prompt_and_reasoning_are_sent(demo: str) -> None:
    backend = await connected(demo)
    messages = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hello"),
        Message(role="assistant", content="Hi.", reasoning="a greeting"),
        Message(role="user", content="What is RAM?"),
    )
    assert (await collect(backend.generate(chat(messages=messages)))).text
    await backend.close()


async def test_a_server_wants_its_key(tmp_path: Path) -> None:
    with llama_server(DEMO, api_key="sk-right") as url:
        for key, works in (("", False), ("sk-wrong", False), ("sk-right", True)):
            keys = KeyRing(file=tmp_path / "keys.toml")
            keys.store(url, key)
            backend = RemoteBackend(keys)
            await collect(backend.load(ServerModel(url), LoadOptions()))
            got = await collect(backend.generate(chat("Hello")))
            assert bool(got.text) is works
            if not works:
                assert got.failed.code == "server_refused"
            await backend.close()


async def test_ending_the_reasoning_of_a_model_that_does_not_reason_does_no_harm(demo: str) -> None:
    backend = await connected(demo)
    assert await backend.end_reasoning() is False  # nothing is written
    answered, asked = [], False
    async for event in backend.generate(chat("Tell me a story", max_tokens=60, ignore_eos=True)):
        answered.append(event)
        if isinstance(event, TextDelta) and not asked:
            asked = True
            await backend.end_reasoning()
    assert Answer(answered).timings.predicted_n == 60
    assert await backend.end_reasoning() is False
    await backend.close()
