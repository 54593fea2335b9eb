"""Tests the dialects of servers, from what each of them really sends."""

from __future__ import annotations

from typing import Any

import pytest

from cpuchat.backend.remote.adapter import KINDS, OLLAMA, OTHER, Adapter, ServerKind
from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.backend.remote.connection import ServerConnection
from cpuchat.chats.records import AnswerSettings
from cpuchat.config.servers import ServerModel
from cpuchat.protocol.messages import (
    Generate,
    LoadOptions,
    LoadProgress,
    ModelLoaded,
    Reconnecting,
    Sampling,
    Speculation,
    Tool,
)
from cpuchat.protocol.model_info import ModelInfo
from tests.support.chatting import Answer, chat, collect
from tests.support.remote_server import RemoteServer, Reply, connected, remote_server


async def answered(server: RemoteServer, **request: Any) -> tuple[ModelInfo, Answer]:
    backend = RemoteBackend()
    loaded = (await collect(backend.load(ServerModel(server.url), LoadOptions()))).events[-1]
    assert isinstance(loaded, ModelLoaded), loaded
    got = await collect(backend.generate(chat("Hello", **request)))
    await backend.close()
    return loaded.model, got


async def test_llama_server() -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        progress = {"total": 40, "cache": 8, "processed": 24, "time_ms": 9}
        await reply.event({"choices": [{"delta": {"content": None}}], "prompt_progress": progress})
        for n, (channel, text) in enumerate((("reasoning_content", "hm"), ("content", "yes")), 1):
            timings = {
                "cache_n": 8, "prompt_n": 32, "prompt_ms": 20.0, "predicted_n": 2 * n, "predicted_ms": 30.0 * n,
                "draft_n": 3 * n, "draft_n_accepted": n, "queue_ms": 250.0,
            }  # fmt: skip
            await reply.event({"id": "c1", "choices": [{"delta": {channel: text}}], "timings": timings})
        await reply.finish("stop", usage={"prompt_tokens": 40, "completion_tokens": 4})

    meta = {"n_params": 8_000_000, "size": 9_000_000, "n_ctx_train": 4096, "n_vocab": 512, "ftype": "Q4_K - Medium"}
    pages = {
        "/v1/models": {"data": [{"id": "demo.gguf", "owned_by": "llamacpp", "meta": meta}]},
        "/props": {"default_generation_settings": {"n_ctx": 2048}},
    }  # fmt: skip
    async with remote_server(answer=answer, pages=pages) as server:
        model, got = await answered(server, sampling=Sampling(seed=5, top_k=7))
        assert model.server.startswith("llama-server at ") and model.name == "demo"
        assert (model.quantization, model.n_ctx, model.n_params) == ("Q4_K_M", 2048, 8_000_000)
        assert "--spec" in dict(model.unreported)["acceptance"] and model.drafts_off is not None
        assert (got.reasoning, got.text) == ("hm", "yes")
        assert (got.timings.cache_n, got.timings.prompt_n, got.timings.predicted_n) == (8, 32, 4)
        assert (got.timings.queue_ms, got.timings.prompt_ms) == (250.0, 20.0)
        assert (got.timings.draft_n, got.timings.draft_n_accepted, got.timings.seed) == (6, 2, 5)
        body = server.chats()[0].body
        assert (body["seed"], body["top_k"], body["timings_per_token"], body["return_progress"]) == (5, 7, True, True)


async def test_vllm_tells_of_the_request_itself_when_it_is_asked_to() -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("x")
        metrics = {
            "time_to_first_token_ms": 0.5, "queue_time_ms": 0.2, "generation_time_ms": 40.0,
            "speculative_decoding": {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 6},
        }  # fmt: skip
        usage: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": 11}
        if len(server.chats()) > 1:  # with --enable-prompt-tokens-details
            usage["prompt_tokens_details"] = {"cached_tokens": 6}
        await reply.event({"choices": [], "usage": usage, "metrics": metrics})
        await reply.finish()

    pages = {"/v1/models": {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 1024}]}}
    async with remote_server(answer=answer, pages=pages) as server:
        model, got = await answered(server)
        assert (model.server.split(" ")[0], model.n_ctx) == ("vLLM", 1024)
        assert "--enable-per-request-metrics" in dict(model.unreported)["prefill_tok_s"]
        assert "--enable-prompt-tokens-details" in dict(model.unreported)["prefill_cached"]
        assert "tokens" not in dict(model.unreported)  # it counts them in each part
        assert "--per-request-spec-decode-metrics" in dict(model.unreported)["acceptance"]
        timings = got.timings
        assert timings.prompt_ms == pytest.approx(0.3)  # without the wait for others
        assert (timings.prompt_n, timings.prompt_per_second, timings.fields()["cache_n"]) == (9, None, None)
        _, again = await answered(server)
        assert (again.timings.cache_n, again.timings.prompt_n) == (6, 3)
        assert again.timings.prompt_per_second == pytest.approx(10_000)
        assert timings.predicted_per_second == pytest.approx(250.0)
        assert (timings.draft_n, timings.draft_n_accepted, timings.tokens_per_pass) == (12, 6, 2.5)


async def test_ollama_lists_what_it_has_and_takes_reasoning_as_an_effort() -> None:
    details = {"family": "llama", "quantization_level": "Q4_K_M"}
    pages = {
        "/v1/models": {"object": "list", "data": [{"id": "demo:latest", "owned_by": "library"}]},
        "/api/tags": {
            "models": [
                {"name": "demo:latest", "size": 5_000_000, "details": details},
                {"name": "other:latest", "size": 5_000_000, "details": details},
            ]
        },
        "/api/ps": {"models": [{"name": "demo:latest", "context_length": 4096}]},
    }
    async with remote_server(pages=pages) as server:
        model, got = await answered(server, reasoning=False)
        assert (model.name, model.quantization, model.n_ctx) == ("demo:latest", "Q4_K_M", 4096)
        assert model.server.startswith("Ollama at ") and got.text == "Hello there."
        assert server.chats()[0].body["reasoning_effort"] == "none"
        _, models = await RemoteBackend().models(server.url)
        assert [(one.name, one.loaded, one.n_ctx) for one in models] == [
            ("demo:latest", True, 4096), ("other:latest", None, 0),
        ]  # fmt: skip


async def test_lm_studio_lists_what_it_has() -> None:
    entry = {
        "id": "qwen", "type": "llm", "arch": "qwen3", "quantization": "Q6_K", "state": "loaded",
        "max_context_length": 32768, "loaded_context_length": 8192,
    }  # fmt: skip
    pages = {"/api/v0/models": {"data": [entry, {"id": "nomic", "type": "embeddings"}]}}
    async with remote_server(owner="organization_owner", pages=pages) as server:
        model, got = await answered(server)
        assert (model.quantization, model.n_ctx, model.architecture) == ("Q6_K", 8192, "qwen3")
        assert model.server.startswith("LM Studio at ")
        assert got.text == "Hello there."


async def test_any_other_server_gets_only_what_openai_knows() -> None:
    async with remote_server() as server:
        model, _ = await answered(server)
        assert model.server.startswith("OpenAI-compatible server at ") and model.quantization == "Q4_K_M"
        known = {"model", "stream", "stream_options", "temperature", "top_p", "seed", "max_tokens", "messages"}
        assert set(server.chats()[0].body) == known
        assert {"n_ctx", "acceptance"} <= dict(model.unreported).keys()
        _, refused = await answered(server, grammar='root ::= "yes"')
        assert "takes no grammars" in refused.failed.message and len(server.chats()) == 1
        _, refused = await answered(server, continues=True)
        assert "cannot continue an answer" in refused.failed.message and len(server.chats()) == 1
        _, got = await answered(server, grammar='root ::= "{}"', json_schema='{"type": "object"}')
        assert server.chats()[1].body["response_format"]["json_schema"]["schema"] == {"type": "object"}
        assert got.finished.matches_grammar is None


SET: dict[str, Any] = {
    "temperature": 0.1, "top_k": 7, "top_p": 0.5, "min_p": 0.2, "repeat_penalty": 1.2, "repeat_last_n": 9,
    "presence_penalty": 0.3, "frequency_penalty": 0.3, "seed": 5, "reasoning": False, "reasoning_budget": 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (KINDS["llamacpp"], {"grammar": "root ::= x"}),
        (KINDS["cpuchat"], {"grammar": "root ::= x"}),
        (KINDS["vllm"], {"structured_outputs": {"grammar": "root ::= x"}}),
        (OTHER, {}),
    ],
    ids=lambda one: getattr(one, "name", ""),
)  # fmt: skip
def test_a_form_is_asked_for_as_the_server_takes_it(kind: ServerKind, form: dict[str, Any]) -> None:
    adapter = Adapter(ServerConnection("http://127.0.0.1:9"), kind)
    names = ("grammar", "structured_outputs", "response_format")
    _, content = adapter.request(chat("Hello", grammar="root ::= x"), "m", 1)
    assert {name: content[name] for name in names if name in content} == form
    _, content = adapter.request(chat("Hello", grammar="{}", json_schema='{"type": "object"}'), "m", 1)
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    asked = {"response_format": {"type": "json_schema", "json_schema": schema}}
    assert {name: content[name] for name in names if name in content} == asked


@pytest.mark.parametrize("kind", [OTHER, OLLAMA, *KINDS.values()], ids=lambda kind: kind.name)
def test_an_adapter_takes_what_reaches_its_server(kind: ServerKind) -> None:
    adapter = Adapter(ServerConnection("http://127.0.0.1:9"), kind)

    def request(**options: Any) -> Generate:
        sampling = {name: options.pop(name) for name in [*options] if name in Sampling.__struct_fields__}
        return chat("Hello", sampling=Sampling(**{"presence_penalty": 0.1, **sampling}), **options)

    def sent(one: Generate) -> Any:
        return adapter.request(one, "m", one.sampling.seed or 0)

    for name, value in SET.items():
        assert (sent(request()) != sent(request(**{name: value}))) == (name in kind.takes), name
    assert set(adapter.missed(request(**SET))) == set(SET) - kind.takes == set(adapter.ignored)
    assert adapter.missed(chat("Hello", sampling=Sampling(repeat_last_n=9))) == []  # a window of no penalty
    unset = tuple(name for name in Sampling.__struct_fields__ if name != "seed")
    bare = str(sent(chat("Hello", sampling=Sampling(seed=5), unset=unset)))  # the server's own values hold
    assert "seed" in bare and not any(f"'{word}" in bare for word in ("temp", "top_", "min_p", "rep", "pres", "freq"))


async def test_an_option_that_a_server_lacks_or_rejects_is_named_and_not_recorded() -> None:
    async def answer(reply: Reply) -> None:
        if "seed" in reply.asked.body:
            await reply.json({"error": {"message": "Unknown parameter: seed", "param": "seed"}}, 400)
        else:
            await reply.whole("Hello")

    asked = Sampling(top_k=7, top_p=0.5, seed=3)
    async with remote_server(answer=answer) as server:
        backend = RemoteBackend()
        await collect(backend.load(ServerModel(server.url), LoadOptions()))
        request = chat("Hello", sampling=asked, reasoning=False, speculation=Speculation(drafters=("suffix",)))
        got = await collect(backend.generate(request))
        kept = AnswerSettings.of(request, backend.model, Sampling())
        await backend.close()
    assert got.finished.note == "top-k, seed, reasoning not supported by the server"
    assert (kept.sampling, kept.reasoning, kept.speculation) == (Sampling(top_p=0.5), None, Speculation())
    assert kept.unset == ("top_k", "min_p", "repeat_penalty", "repeat_last_n", "seed")


READ = Tool(
    name="read_file", description="Return the lines of a text file in the folder, from a first to a last one.",
    parameters={"type": "object", "properties": {"path": {"type": "string"}}}, source="folder", origin="/x",
)  # fmt: skip


@pytest.mark.parametrize(
    ("prompt_tokens", "calls", "noted"),
    [(12, None, True), (90, None, False), (None, None, False), (12, [{"function": {"name": "read_file"}}], False)],
    ids=["dropped", "rendered", "unreported", "called"],
)
async def test_a_server_that_ignores_tools_is_noticed_once(
    prompt_tokens: int | None, calls: list[Any] | None, noted: bool
) -> None:
    async def answer(reply: Reply) -> None:
        assert reply.asked.body["tools"][0]["function"]["name"] == "read_file"
        await reply.head()
        await reply.event({"id": "a1", "choices": [{"index": 0, "delta": {"content": "No.", "tool_calls": calls}}]})
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 2}
        await reply.finish(**({"usage": usage} if prompt_tokens else {}))

    async with connected(answer) as (_, backend):
        notes = [
            (await collect(backend.generate(chat("What is in notes.txt?", tools=(READ,))))).finished.note for _ in "12"
        ]
    assert notes == ["tools ignored by the server: its prompt is shorter than their descriptions" if noted else "", ""]


@pytest.mark.parametrize(
    "page",
    [
        [{"id": "m", "object": "model"}],
        {"models": [{"name": "m"}]},
        {"data": [{"name": "m"}, {"id": 7}, None]},
        {"object": "list", "data": ["m"]},
    ],
    ids=["list alone", "models", "name", "texts"],
)
async def test_lists_of_models_are_read_in_other_forms(page: object) -> None:
    async with remote_server(pages={"/v1/models": page, "/openai/v1/models": None, "/openai/models": page}) as server:
        for address in (server.url, f"{server.url}/openai"):
            _, models = await RemoteBackend().models(address)
            assert [model.name for model in models] == ["m"]


async def test_an_option_that_strict_servers_forbid_is_left_out() -> None:
    async def answer(reply: Reply) -> None:
        if "stream_options" in reply.asked.body:
            detail = [{"type": "extra_forbidden", "loc": ["body", "stream_options"], "msg": "not permitted"}]
            await reply.json({"object": "Error", "message": detail, "detail": detail, "code": 3001}, 422)
        elif "max_tokens" in reply.asked.body:
            error = {"message": "Use 'max_completion_tokens' instead.", "param": "max_tokens"}
            await reply.json({"error": error}, 400)
        else:
            await reply.whole("Hello")

    async with connected(answer) as (server, backend):
        for _ in range(2):
            assert (await collect(backend.generate(chat("Hi", max_tokens=5)))).text == "Hello"
        assert len(server.chats()) == 4 and server.chats()[-1].body["max_completion_tokens"] == 5


async def test_a_server_that_loads_its_model_is_waited_for_also_in_the_middle_of_a_chat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cpuchat.backend.remote.connection.LOADING_SECONDS", 0.0)
    looks = 0

    async def loading(reply: Reply) -> None:
        nonlocal looks
        looks += 1
        if looks % 20:
            await reply.json({"error": {"message": "Loading model", "code": 503}}, 503)
        elif reply.asked.method == "GET":
            await reply.json({"data": [{"id": "m"}]})
        else:
            await reply.whole("Here.")

    async with remote_server(answer=loading, pages={"/v1/models": loading}) as server:
        backend = RemoteBackend()
        got = await collect(backend.load(ServerModel(server.url), LoadOptions()))
        assert [event.phase for event in got.of(LoadProgress)] == ["connecting", "waiting"]
        assert isinstance(got.events[-1], ModelLoaded) and looks == 20
        answer = await collect(backend.generate(chat("Hello")))
        assert answer.text == "Here." and answer.of(Reconnecting)[0].attempt == 0
        await backend.close()


@pytest.mark.parametrize(("pages", "kind"), [({"/api/tags": {"models": []}}, "Ollama"), ({}, "OpenAI-compatible")])
async def test_ollama_is_known_whoever_owns_its_models(pages: dict[str, Any], kind: str) -> None:
    async with remote_server(owner="hf.co/maker", pages=pages) as server:
        found, _ = await RemoteBackend().models(server.url)
        assert found.startswith(kind)
