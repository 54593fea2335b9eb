"""`cpuchat serve` as agents use it: OpenAI's and Anthropic's own clients, three dialects at once, and restarts.

    python benchmarks/agents.py [--quick] [--rounds N] [--only sdks,mixed,restart,slots,grammar] [--model FILE]

sdks: 200 generated requests of each client (chat and responses, messages), streamed and whole, with tools and forms of
their own; every event is parsed by the client; errors are counted. mixed: 1,000 requests of the three dialects by 8
clients, half of them cut at a random moment: workers lost, slots not released, the median memory in the last fifth
against that in the second. Both with the demo model. restart: an agent with 8,000 tokens of system prompt and tools;
its first request after a restart of the server with the next one; slots: the same with llama-server, whose slot is
saved and restored by its own interface. grammar: decoding the arguments of a call under its grammar with decoding text.
These with a real model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from baselines import llama_server
from build_llama import tool
from common import WORK, MeasureError, Row, Target, arguments, machine, report, run_main, say
from product import default_threads
from serve import CLIENTS, KEPT_GB, metric, our_server, slot, until_idle

PARTS = ("sdks", "mixed", "restart", "slots", "grammar")
SDK_REQUESTS, MIXED_REQUESTS = 200, 1_000
AGENT_TOKENS, CONTEXT = 8_000, 12_288
REAL = WORK / "models" / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
DOCS = Path(__file__).parent.parent / "docs"
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}, "depth": {"enum": [1, 2, 3]}},
    "required": ["place", "depth"],
    "additionalProperties": False,
}
WORDS = ("file", "error", "line", "agent", "token", "queue", "Zürich", "東京", "\n\t", "{}[]<>\"'\\", "🙂")


def _text(dice: random.Random) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randrange(1, 30)))


def _chat(dice: random.Random) -> dict[str, Any]:
    """Return a generated request in the chat dialect."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": _text(dice)}], "max_tokens": dice.randrange(1, 40)}
    if dice.random() < 0.5:
        body["messages"].insert(0, {"role": dice.choice(["system", "developer"]), "content": _text(dice)})
    kind = dice.randrange(5)
    if kind < 2:
        names = [f"tool_{n}" for n in range(dice.randrange(1, 4))]
        body["tools"] = [
            {"type": "function", "function": {"name": one, "description": _text(dice), "parameters": PLACE}}
            for one in names
        ]
        body["tool_choice"] = dice.choice(["auto", "required", "none"])
        body["parallel_tool_calls"] = dice.random() < 0.5
        if dice.random() < 0.5:
            call = {"id": "call12345", "type": "function", "function": {"name": names[0], "arguments": '{"place":1}'}}
            body["messages"] += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call12345", "content": _text(dice)},
            ]
    elif kind == 2:
        form = {"name": "place", "schema": PLACE, "strict": True}
        body |= {"response_format": {"type": "json_schema", "json_schema": form}, "max_tokens": 60}
    elif kind == 3:
        body |= {"n": dice.randrange(1, 4), "logprobs": True, "top_logprobs": 2}
    return body


def _responses(dice: random.Random) -> dict[str, Any]:
    """Return the like for /v1/responses."""
    chat = _chat(dice)
    items: list[dict[str, Any]] = []
    for one in chat["messages"]:
        if one["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": one["tool_call_id"], "output": one["content"]})
        elif one.get("tool_calls"):
            function = one["tool_calls"][0]["function"]
            items.append({"type": "function_call", "call_id": one["tool_calls"][0]["id"], **function})
        else:
            items.append(one)
    body: dict[str, Any] = {"input": items, "max_output_tokens": chat["max_tokens"]}
    if "tools" in chat:
        body["tools"] = [{"type": "function", **one["function"], "strict": False} for one in chat["tools"]]
        body["tool_choice"] = chat["tool_choice"]
    if "response_format" in chat:
        body["text"] = {"format": {"type": "json_schema", **chat["response_format"]["json_schema"]}}
    return body


def _messages(dice: random.Random) -> dict[str, Any]:
    """Return the like for /v1/messages."""
    chat = _chat(dice)
    body: dict[str, Any] = {"messages": [], "max_tokens": chat["max_tokens"]}
    for one in chat["messages"]:
        if one["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": one["content"]}
            body["messages"].append({"role": "user", "content": [block]})
        elif one.get("tool_calls"):
            call = one["tool_calls"][0]
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {"place": 1}}
            body["messages"].append({"role": "assistant", "content": [block]})
        elif one["role"] == "user":
            body["messages"].append(one)
        else:
            body["system"] = one["content"]
    if "tools" in chat:
        tools = [one["function"] for one in chat["tools"]]
        body["tools"] = [{"name": one["name"], "input_schema": one["parameters"]} for one in tools]
        kinds = {"auto": "auto", "required": "any", "none": "none"}
        body["tool_choice"] = {"type": kinds[chat["tool_choice"]]}
    return body


DIALECTS = {"/v1/chat/completions": _chat, "/v1/responses": _responses, "/v1/messages": _messages}


def sdks(requests: int, threads: int) -> list[Row]:
    """Count the errors of both clients over generated requests."""
    from anthropic import Anthropic
    from openai import OpenAI

    errors: Counter[str] = Counter()
    events = 0
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder, _serving("demo", threads, folder) as (url, _):
        openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        anthropic = Anthropic(base_url=url, api_key="none", max_retries=0)
        for number in range(requests):
            for name, ask in (("openai", _ask_openai), ("anthropic", _ask_anthropic)):
                dice = random.Random(number)
                try:
                    events += ask(openai if name == "openai" else anthropic, dice)
                except Exception as error:  # whatever a client raises counts
                    errors[name] += 1
                    say(f"  {name}, request {number}: {type(error).__name__}: {str(error)[:300]}")
    note = f"{events:,} events of streams parsed"
    return [
        Row(f"{requests} generated requests of the {name} client: errors", "", [errors[name]], target=Target(0, False),
            note=note)
        for name in ("openai", "anthropic")
    ]  # fmt: skip


def _ask_openai(client: Any, dice: random.Random) -> int:
    """Send one request; returns the events of its stream."""
    if dice.random() < 0.5:
        body = _responses(dice)
        if dice.random() < 0.5:
            client.responses.create(model="", **body).model_dump_json()
            return 0
        with client.responses.stream(model="", **body) as stream:
            n_events = sum(1 for _ in stream)
            with contextlib.suppress(RuntimeError):  # of one that was cut
                stream.get_final_response()
            return n_events
    body = _chat(dice)
    if dice.random() < 0.5:
        answer = client.chat.completions.create(model="", **body)
        for choice in answer.choices:
            for call in choice.message.tool_calls or () if choice.finish_reason == "tool_calls" else ():
                json.loads(call.function.arguments)
        return 0
    return sum(1 for _ in client.chat.completions.create(model="", stream=True, **body))


def _ask_anthropic(client: Any, dice: random.Random) -> int:
    body = _messages(dice)
    if dice.random() < 0.1:
        counted = {name: value for name, value in body.items() if name != "max_tokens"}
        return client.messages.count_tokens(model="", **counted).input_tokens * 0
    if dice.random() < 0.5:
        client.messages.create(model="", **body).model_dump_json()
        return 0
    with client.messages.stream(model="", **body) as stream:
        n_events = sum(1 for _ in stream)
        stream.get_final_message()
        return n_events


def mixed(requests: int, threads: int) -> list[Row]:
    """Raises MeasureError when a request fails that was not cut."""
    with (
        tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder,
        our_server(
            Path("demo"), "--threads", str(threads), "--queue", str(2 * CLIENTS), folder=Path(folder), kept_gb=KEPT_GB
        ) as (url, server),
    ):
        (worker,) = (p for p in server.children() if "cpuchat.worker" in " ".join(p.cmdline()))
        memory: list[tuple[int, int]] = []  # of both, after each request
        lock = threading.Lock()

        def client(number: int) -> None:
            dice = random.Random(number)
            for turn in range(-(-requests // CLIENTS)):
                _mixed_request(url, dice, cut=bool((turn + number) % 2))
                with lock:
                    memory.append((server.memory_info().rss, worker.memory_info().rss))

        with ThreadPoolExecutor(CLIENTS) as pool:
            for future in [pool.submit(client, number) for number in range(CLIENTS)]:
                future.result()
        until_idle(url)
        lost = 0.0 if worker.is_running() and metric(url, "model_loads_total") == 1 else 1.0
        leaked = float(slot(url)["is_processing"]) + slot(url)["n_waiting"]
    fifth = len(memory) // 5
    settled, end = (
        [statistics.median(sizes) for sizes in zip(*part, strict=True)]
        for part in (memory[fifth : 2 * fifth], memory[-fifth:])
    )
    what = f"{requests} requests in three dialects, {CLIENTS} clients, half of them cut: "
    return [
        Row(f"{what}workers lost", "", [lost], target=Target(0, False)),
        Row(f"{what}slots not released", "", [leaked], target=Target(0, False)),
        Row(f"{what}memory of the server, last ÷ second fifth", "×", [end[0] / settled[0]], target=Target(1.05, False)),
        Row(f"{what}memory of the worker, last ÷ second fifth", "×", [end[1] / settled[1]], target=Target(1.05, False)),
    ]


def _mixed_request(url: str, dice: random.Random, cut: bool) -> None:
    path = dice.choice(list(DIALECTS))
    body = {**DIALECTS[path](dice), "stream": dice.random() < 0.7}
    lines, wait = dice.randrange(4), dice.random()
    timeout = httpx.Timeout(120, read=wait) if cut and not lines else 120
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("POST", f"{url}{path}", json=body, timeout=timeout, trust_env=False) as response,
    ):
        if response.status_code != 200:
            raise MeasureError(f"{path}: {response.status_code} {response.read()[:300]!r}")
        for number, _ in enumerate(response.iter_lines()):
            if cut and number >= lines:
                return


@contextlib.contextmanager
def _serving(model: Path | str, threads: int, folder: str, *more: str) -> Iterator[tuple[str, Any]]:
    """Run our server; its caches outlive it if `folder` does."""
    with our_server(Path(model), "--threads", str(threads), *more, folder=Path(folder), own_cache=True) as found:
        yield found


def _agent(n_tokens: int, question: str) -> dict[str, Any]:
    """Return a request of an agent: some tools, and a system prompt of about so many tokens with them."""
    tools = [
        {"type": "function", "function": {
            "name": f"tool_{n}",
            "description": "Reads, writes or searches a file of the project and returns what it found there.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}
        for n in range(20)
    ]  # fmt: skip
    text = "".join(file.read_text() for file in sorted(DOCS.glob("*.md")))
    system = text[: int(3.3 * (n_tokens - 20 * 75))]
    talk = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": talk, "tools": tools, "max_tokens": 2, "temperature": 0, "stream": True}


def _first_token(url: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the ms to the first text, and the timings. Raises MeasureError."""
    start, first, timings = time.perf_counter(), 0.0, None
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=3600, trust_env=False) as response:
        if response.status_code != 200:
            raise MeasureError(f"{url}: {response.status_code} {response.read()[:300]!r}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            timings = event.get("timings", timings)
            said = any(one["delta"].get("content") for one in event["choices"])
            if not first and said:
                first = 1e3 * (time.perf_counter() - start)
    if timings is None:
        raise MeasureError("no timings")
    return first or 1e3 * (time.perf_counter() - start), timings


def _question(number: int) -> str:
    return f"Question {number}: which of the files tells how the queue of the server works, and why is it so? Answer."


def restart(file: Path, threads: int, rounds: int, n_tokens: int, *, slots: bool) -> list[Row]:
    """First token of an agent's first request after a restart, with its next one, and with llama-server's (`slots`)."""
    again, same, evaluated, theirs = list[float](), list[float](), list[float](), list[float]()
    options = ("--ctx", str(CONTEXT), "--drafters", "off")
    # As the others begin: else the next request would have two tokens more in common with the one before it.
    before = _question(2 * rounds)
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder:
        with _serving(file, threads, folder, *options) as (url, _):
            _, first = _first_token(url, _agent(n_tokens, before))
            say(f"  the agent's prompt: {first['prompt_n']:,} tokens in {first['prompt_ms'] / 1e3:.0f} s")
        for number in range(rounds):
            with _serving(file, threads, folder, *options) as (url, _):
                time.sleep(1)  # the state is read while nobody asks
                ms, timings = _first_token(url, _agent(n_tokens, _question(2 * number)))
                again.append(ms)
                ms, next_timings = _first_token(url, _agent(n_tokens, _question(2 * number + 1)))
                same.append(ms)
                evaluated.append(timings["prompt_n"] - next_timings["prompt_n"])
        extra = ("--jinja", "--slot-save-path", folder)
        save = {"filename": "agent.bin"}
        for number in range(rounds + 1 if slots else 0):
            log = Path(folder) / "llama.log"
            with llama_server(file, threads=threads, n_ctx=CONTEXT, log=log, extra=extra) as other:
                if number:
                    httpx.post(f"{other.url}/slots/0?action=restore", json=save, timeout=600).raise_for_status()
                    theirs.append(_first_token(other.url, _agent(n_tokens, _question(2 * number)))[0])
                else:
                    _first_token(other.url, _agent(n_tokens, before))
                    httpx.post(f"{other.url}/slots/0?action=save", json=save, timeout=600).raise_for_status()
    what = f"an agent of {first['prompt_n']:,} tokens after a restart, {file.stem}: "
    restored = f"{what}first token, baseline: llama-server with its slot restored"
    return [
        Row(f"{what}tokens evaluated beyond what is new", "", evaluated, target=Target(64, False)),
        Row(f"{what}first token, baseline: without a restart", "ms", again, same, Target(1.1, False)),
        *([Row(restored, "ms", again, theirs, Target(1.1, False))] if slots else []),
    ]


def grammar(file: Path, threads: int, rounds: int) -> Row:
    """Decoding the text in a call's arguments, held to the call's grammar, with decoding text."""
    tool = {"name": "write_file", "description": "Writes a file.", "strict": True, "parameters": {
        "type": "object", "properties": {"content": {"type": "string"}}, "required": ["content"],
        "additionalProperties": False}}  # fmt: skip
    asked = "Write a long story about a queue."
    body = {"messages": [{"role": "user", "content": asked}], "max_tokens": 128, "temperature": 0}
    body |= {"tools": [{"type": "function", "function": tool}]}
    guided, free = list[float](), list[float]()
    with (
        tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder,
        _serving(file, threads, folder, "--ctx", "4096", "--drafters", "off") as (url, _),
    ):
        for number in range(rounds + 1):
            for choice, found in (("required", guided), ("none", free)):
                answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "tool_choice": choice}, timeout=600)
                timings = answer.raise_for_status().json()["timings"]
                if number and timings["predicted_n"] > 32:
                    found.append(timings["predicted_per_second"])
    if len(guided) != rounds or len(free) != rounds:
        raise MeasureError("the answers are too short")
    return Row(f"decode of a call under its grammar, baseline: text, {file.stem}", "tok/s", guided, free, Target(0.95))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts: {','.join(PARTS)}")
    parser.add_argument("--model", type=Path, default=REAL, help="GGUF file of an instruction model")
    parser.add_argument("--threads", type=int, default=0, help="for both sides (0: cpuchat's choice)")


def main() -> None:
    options = arguments(__doc__, _options)
    where, parts, quick = machine(), options.only.split(","), options.quick
    if "slots" in parts:
        tool("llama-server")  # fails before minutes are spent
    threads, rounds = options.threads or default_threads(), options.rounds or (1 if options.quick else 5)
    rows: list[Row] = []
    if "sdks" in parts:
        rows += sdks(20 if quick else SDK_REQUESTS, threads)
    if "mixed" in parts:
        rows += mixed(80 if quick else MIXED_REQUESTS, threads)
    if "restart" in parts:
        rows += restart(options.model, threads, rounds, 2_500 if quick else AGENT_TOKENS, slots="slots" in parts)
    if "grammar" in parts:
        rows.append(grammar(options.model, threads, rounds))
    report(
        "agents", where, rows, quick=quick, remarks=[f"{threads} threads on both sides, no drafts in the last parts"]
    )


if __name__ == "__main__":
    run_main(main)
