"""Tests the backend against a real llama-server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from cpuchat.backend.remote.adapter import Adapter
from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.backend.switching import SwitchingBackend
from cpuchat.base import paths
from cpuchat.config.servers import ServerModel
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import LoadOptions, ModelLoaded, PrefillProgress
from cpuchat.telemetry.meter import Meter
from tests.support.chatting import GREEDY, Answer, chat, collect, in_use, load
from tests.support.llama_server import llama_server, metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("measured_machine")]
DEMO, DRAFT = (paths.demo_dir() / DEMO_FILES[name] for name in ("demo", "demo-draft"))
RATES = (1.0, 0.0)


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


async def test_it_answers_as_the_worker_does(demo: str) -> None:
    request = chat("What is cpuchat?", sampling=GREEDY, max_tokens=40)
    async with in_use(SwitchingBackend()) as backend:
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


async def test_figures_are_the_servers(demo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, meter, seen, original = await connected(demo), Meter(), [], Adapter.chunk

    def listening(adapter: Adapter, data: dict) -> object:
        seen.append(data.get("timings"))
        return original(adapter, data)

    monkeypatch.setattr(Adapter, "chunk", listening)
    assert backend.model is not None
    meter.observe(ModelLoaded(model=backend.model), 0.0)
    meter.request_started(time.monotonic())
    events = []
    async for event in backend.generate(chat("Tell me a story", max_tokens=64)):
        events.append(event)
        meter.observe(event, time.monotonic())
    got, last = Answer(events), [one for one in seen if one][-1]
    figures = meter.figures()
    assert figures.decode_tok_s.value == pytest.approx(last["predicted_per_second"], rel=0.01)
    assert figures.prefill_tok_s.value == pytest.approx(last["prompt_per_second"], rel=0.01)
    assert got.timings.predicted_n == last["predicted_n"] and not figures.approximate
    assert figures.n_past.value == got.timings.n_past == last["cache_n"] + last["prompt_n"] + last["predicted_n"] - 1
    assert figures.n_ctx.value == 2048
    assert got.of(PrefillProgress)[-1].processed == got.of(PrefillProgress)[-1].total
    await backend.close()


async def test_acceptance_is_what_the_server_counts(drafting: str) -> None:
    before = metrics(drafting)
    backend = await connected(drafting)
    got = await collect(backend.generate(chat("Tell me a story", max_tokens=201, ignore_eos=True)))
    await backend.close()
    figures, after = got.timings.speculation, metrics(drafting)
    assert figures is not None and figures.source == "server"
    names = {"draft_tokens": figures.draft_n, "accepted_tokens": figures.draft_n_accepted, "drafts": figures.passes}
    for name, shown in names.items():
        counter = f"llamacpp:spec_decode_num_{name}_total"
        assert after[counter] - before[counter] == pytest.approx(shown, abs=1), name
    assert got.timings.tokens_per_pass == pytest.approx(200 / figures.passes)
    # The server is told to accept the first token of each pass and no second one; it does so for 94 % of the passes.
    assert figures.draft_n_accepted / figures.draft_n == pytest.approx(0.47, abs=0.03)
