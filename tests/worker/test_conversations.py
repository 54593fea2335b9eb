"""Tests conversations that requests do not name: each keeps its KV cache while others are answered."""

from __future__ import annotations

from pathlib import Path

from cpuchat.backend.local import LocalBackend
from cpuchat.config.servers import RunningServer, recorded
from cpuchat.protocol.messages import Generate, LoadOptions, ModelLoaded
from tests.support.chatting import Answer, chat, collect
from tests.support.cores import ON_ONE_CPU
from tests.support.tiny_gguf import write_tiny_gguf

TEXTS = ("One is my favourite number. " * 20, "There was a second one, too. " * 20, "A third, and that is all. " * 20)


async def answered(backend: LocalBackend, request: Generate) -> Answer:
    return await collect(backend.generate(request))


async def loaded(model: Path, limit: int) -> LocalBackend:
    backend = LocalBackend(state_limit=limit)
    assert isinstance((await collect(backend.load(model, LoadOptions(n_ctx=4096), ON_ONE_CPU))).events[-1], ModelLoaded)
    return backend


async def test_each_conversation_and_each_fork_goes_on_where_it_was_and_answers_the_same(tiny_model: Path) -> None:
    with recorded(RunningServer("http://127.0.0.1:9", "other", pid=1)):
        backend = await loaded(tiny_model, 1 << 28)
    try:
        assert backend.model is not None
        assert "http://127.0.0.1:9" in backend.model.notes[-1]  # whoever loads a model beside a server is told
        first = [await answered(backend, chat(text)) for text in TEXTS]
        for text, before in zip(TEXTS, first, strict=True):
            again = await answered(backend, chat(text, before.text, "And then?"))
            assert again.timings.cache_n >= before.timings.prompt_n + before.timings.predicted_n - 1

        begun = (TEXTS[0], first[0].text)
        long = await answered(backend, chat(*begun, TEXTS[1]))
        await answered(backend, chat(*begun, TEXTS[2]))
        again = await answered(backend, chat(*begun, TEXTS[1], long.text, "Well?"))
        assert again.timings.cache_n >= long.timings.cache_n + long.timings.prompt_n

        at_once = await answered(backend, chat(*begun, "What else?"))
        await answered(backend, chat(TEXTS[1]))
        assert (await answered(backend, chat(*begun, "What else?"))).text == at_once.text
    finally:
        await backend.close()


async def test_the_least_recently_used_go_when_the_limit_is_reached(tiny_model: Path) -> None:
    small = await loaded(tiny_model, 400_000)  # one state of these, not two
    try:
        first = [await answered(small, chat(text)) for text in TEXTS]
        kept = []
        for text, before in zip(reversed(TEXTS), reversed(first), strict=True):
            kept.append((await answered(small, chat(text, before.text, "?"))).timings.cache_n)
        assert kept[0] > 100
        assert kept[1] > 100
        assert kept[2] < 100
    finally:
        await small.close()


async def test_a_recurrent_model_continues_from_a_whole_state_only(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "mamba.gguf", arch="mamba")
    backend = await loaded(model, 1 << 28)
    try:
        first = await answered(backend, chat(TEXTS[0]))
        await answered(backend, chat(TEXTS[1]))
        again = await answered(backend, chat(TEXTS[0], first.text, "And then?"))
        assert again.timings.cache_n >= first.timings.prompt_n
    finally:
        await backend.close()


async def test_without_a_limit_only_the_last_is_known_and_messages_are_left_out_only_when_that_is_wanted(
    tiny_model: Path,
) -> None:
    backend = await loaded(tiny_model, 0)
    try:
        first = await answered(backend, chat(TEXTS[0]))
        await answered(backend, chat(TEXTS[1]))
        again = await answered(backend, chat(TEXTS[0], first.text, "And then?"))
        assert again.timings.cache_n < 100

        long = [text for _ in range(12) for text in (TEXTS[0], "Yes.")]
        trimmed = await answered(backend, chat(*long, "Hello"))
        assert trimmed.finished
        refused = await answered(backend, chat(*long, "Hello", when_full="refuse"))
        assert refused.failed.code == "context_full"
    finally:
        await backend.close()
