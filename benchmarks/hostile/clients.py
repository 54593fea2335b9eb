"""A server with several answers at once under clients that come, ask anything, and leave in the middle.

    python benchmarks/hostile/clients.py [--minutes 10] [--clients 16] [--arch llama] [--seed N]

Random requests with common beginnings: chats, completions, responses and messages, whole or streamed, with two answers,
grammars, schemas, stop strings and tools, greedy or seeded, of clients of which some share what was evaluated. Half are
cut at a random time: in the queue, while the prompt is read, in the answer. Some read slowly. Afterwards each request
that was answered is asked again alone, and the answers are compared: texts, calls, ends and numbers of tokens.

The model is a tiny one with random weights, whose answers depend on all of the context; a hybrid (`--arch qwen35`)
answers one at a time. Those with sliding windows are left out: a restored state of theirs rounds otherwise, so answers
may differ. Bars: no answer differs, drafted tokens are accepted, nothing fails or hangs, no traceback in a log; at the
end no slot is in use and no more files are open than at first; after two minutes no process grows by 5 %. Else the exit
status is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common import machine, run_main, say, table
from tests.engine.llama.test_kernels_reported import quantized
from tests.support.serving import Server, server
from tests.support.tiny_gguf import write_tiny_gguf

N_BODIES, N_OWNERS, HANG_SECONDS, GROWTH = 400, 4, 120.0, 1.05
WORDS = ["the", "cat", "then", "read", "in an", "inner", "ring", "all", "her", "tea", "on", "hill", "é", "猫", "🐈",
         "\n", "12", "(", "{", '"', ".", ",", "?", "-", "<think>", "```"]  # fmt: skip
TOLD = {"content", "text", "delta", "arguments", "partial_json", "reasoning_content", "thinking", "name", "stop_reason",
        "finish_reason", "completion_tokens", "output_tokens", "prompt_tokens", "status"}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
          "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
STOPS, GRAMMAR = ["the", "é", "in an"], 'root ::= "(" [a-z]+ ")"'
Answer = dict[tuple[str, str], str]
Body = tuple[str, dict[str, Any]]


class Asked(NamedTuple):
    number: int
    result: str  # "ok", "cut" by the client, or why it failed
    answer: Answer


def words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(WORDS, k=n))


def make_body(rng: random.Random, heads: list[str]) -> Body:
    """Return where a random request goes, and what it is."""
    limit, head, text = rng.choice((1, 8, 24, 64, 160)), rng.choice(heads), words(rng, rng.choice((1, 10, 60, 200)))
    seeded = {"temperature": 1.0, "seed": rng.randrange(1000)}
    body: dict[str, Any] = {"stream": rng.random() < 0.6} | rng.choice(({"temperature": 0.0}, seeded))
    asked = [{"role": "user", "content": text}]
    if rng.random() < 0.4:
        asked += [{"role": "assistant", "content": words(rng, 5)}, {"role": "user", "content": words(rng, 9)}]
    tool, form = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}, {"schema": SCHEMA, "name": "a"}
    call, extra = {"type": "function", **tool}, rng.choice(("", "", "stop", "form", "tools"))
    several = {"max_tokens": limit, "n": rng.choice((1, 1, 2))}
    match rng.choice(("chat", "completions", "responses", "messages")):
        case "completions":
            more = {"stop": {"stop": STOPS}, "form": {"grammar": GRAMMAR}}
            return "/v1/completions", {**body, "prompt": head + text, **several, **more.get(extra, {})}
        case "responses":
            more = {"tools": {"tools": [call], "tool_choice": "required"},
                    "form": {"text": {"format": {"type": "json_schema", **form}}}}  # fmt: skip
            sent = {"instructions": head, "input": asked, "max_output_tokens": limit}
            return "/v1/responses", {**body, **sent, **more.get(extra, {})}
        case "messages":
            offered = {"name": "weather", "input_schema": SCHEMA}
            more = {"stop": {"stop_sequences": STOPS}, "tools": {"tools": [offered], "tool_choice": {"type": "any"}}}
            sent = {"system": head, "messages": asked, "max_tokens": limit}
            return "/v1/messages", {**body, **sent, **more.get(extra, {})}
    more = {"stop": {"stop": STOPS}, "form": {"response_format": {"type": "json_schema", "json_schema": form}},
            "tools": {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}}  # fmt: skip
    body["messages"] = [{"role": "system", "content": head}, *asked]
    return "/v1/chat/completions", {**body, **several, **more.get(extra, {})}


def gather(value: Any, answer: Answer, place: str = "") -> None:
    """Add what an event or a whole response tells to the answer, whatever the dialect: texts in pieces are joined."""
    if isinstance(value, dict):
        place += "".join(f"/{value[key]}" for key in ("index", "output_index") if key in value)
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(one, dict | list):
            gather(one, answer, place)
        elif key in TOLD and one is not None:
            answer[place, key] = answer.get((place, key), "") + str(one)


def lines(response: httpx.Response) -> Iterator[str]:
    """Give the lines of a response; `iter_lines` also splits at U+0085 and U+2028, which JSON may hold."""
    rest = ""
    for text in response.iter_text():
        *whole, rest = (rest + text).split("\n")
        yield from whole
    yield rest


def ask(http: httpx.Client, body: Body, owner: str, cut: float = 0.0, pause: float = 0.0) -> tuple[str, Answer]:
    """Ask, and hang up after `cut` seconds (0: never); `pause` before each line is read."""
    answer, end = Answer(), time.monotonic() + (cut or HANG_SECONDS)
    late, (path, fields) = "cut" if cut else "hung", body
    try:
        timeout = httpx.Timeout(HANG_SECONDS, read=cut or HANG_SECONDS)
        with http.stream("POST", path, json={**fields, "cache_salt": owner}, timeout=timeout) as response:
            for line in lines(response):
                if time.monotonic() > end:
                    return late, answer
                time.sleep(pause)
                if (line := line.removeprefix("data: ")).startswith("{"):
                    told = json.loads(line)
                    if told.get("error"):
                        return f"{response.status_code} {told['error']}", answer
                    gather(told, answer)
            return "ok" if response.status_code == 200 else f"status {response.status_code}", answer
    except httpx.HTTPError as error:
        return late if isinstance(error, httpx.ReadTimeout) else repr(error), answer


class Client(threading.Thread):
    """Asks one request after the other until the time is over."""

    def __init__(self, url: str, number: int, bodies: list[Body], end: float, seed: int) -> None:
        super().__init__()
        self._rng, self._bodies, self._end = random.Random(f"{seed} {number}"), bodies, end
        self._owner = f"owner {number % N_OWNERS}"
        self._http = httpx.Client(base_url=url, trust_env=False, headers={"user-agent": f"client {number}"})
        self.asked = list[Asked]()

    def run(self) -> None:
        with self._http:
            while time.monotonic() < self._end:
                number = self._rng.randrange(len(self._bodies))
                cut = self._rng.choice((0.02, 0.1, 0.5, 2.0)) * self._rng.random() if self._rng.random() < 0.5 else 0.0
                pause = 0.02 if self._rng.random() < 0.05 else 0.0
                self.asked.append(Asked(number, *ask(self._http, self._bodies[number], self._owner, cut, pause)))


def sample(running: Server) -> dict[str, int]:
    found = dict[str, int]()
    for name, process in (("server", psutil.Process(running.process.pid)), ("worker", running.worker)):
        found |= {f"{name} KiB": process.memory_info().rss // 1024}
        found |= {f"{name} files": process.num_fds(), f"{name} threads": process.num_threads()}
    return found


def let_ask(running: Server, options: Any, bodies: list[Body]) -> tuple[list[Asked], dict[str, dict[str, int]]]:
    """Let the clients ask; return what they asked, and the samples by their time."""
    start, samples = time.monotonic(), {"before": sample(running)}
    end = start + 60 * options.minutes
    clients = [Client(running.url, number, bodies, end, options.seed) for number in range(options.clients)]
    for client in clients:
        client.start()
    for minutes in sorted({min(one, options.minutes) for one in (0.5, 2.0, 5.0, options.minutes)}):
        time.sleep(max(start + 60 * minutes - time.monotonic(), 0))
        samples[f"{minutes:g} min"] = sample(running)
    for client in clients:
        client.join()
    running.wait_for(running=0, waiting=0)
    return [one for client in clients for one in client.asked], {**samples, "after": sample(running)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("minutes", 10.0), ("clients", 16), ("parallel", 4), ("seed", 1), ("arch", "llama")):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    if options.arch.startswith("gemma"):
        parser.error("a restored state of sliding windows rounds otherwise: answers alone may differ")
    where, rng = machine(), random.Random(options.seed)
    heads = [words(rng, n) for n in (3, 40, 120, 400)]
    bodies = [make_body(rng, heads) for _ in range(N_BODIES)]
    with tempfile.TemporaryDirectory() as name:
        folder, n_layer = Path(name), 4 if options.arch == "qwen35" else 2
        model = write_tiny_gguf(
            folder / "tiny.gguf", arch=options.arch, gain=3.0, eos_bias=0.0, n_embd=256, n_ff=512, n_layer=n_layer
        )
        (folder / "config").mkdir()
        kept = "[engine]\nsaved_kv_gb = 0.1\n"  # so that it is soon full
        drafts = "[speculation]\ndepth = 3\n"  # always: passes of so small a model are too fast to choose a depth
        (folder / "config" / "config.toml").write_text(kept + drafts)
        more = "--parallel", str(options.parallel), "--queue", "64", "--drafters", "suffix"
        with server(quantized(model, "Q8_0"), folder, *more) as one:
            slots, (asked, samples) = one.metric("slots"), let_ask(one, options, bodies)
            answered, results = [done for done in asked if done.result == "ok"], Counter(done.result for done in asked)
            drafted, accepted = (one.metric(f"draft_tokens{end}_total") or 0 for end in ("", "_accepted"))
            alone = {n: ask(one.http, bodies[n], f"alone {n}")[1] for n in {done.number for done in answered}}
        logs = [file.read_text(errors="replace") for file in folder.rglob("*") if file.suffix in (".txt", ".log")]
    wrong = [done for done in answered if done.answer != alone[done.number]]
    for done in wrong[:5]:
        say(f"differs: {bodies[done.number]}\n  beside {done.answer}\n  alone  {alone[done.number]}")
    faults = [log[log.index("Traceback") :][:3000] for log in logs if "Traceback" in log]
    settled, limits = samples.get("2 min", samples["after"]), dict(samples["before"])
    limits |= {key: int(GROWTH * n) for key, n in settled.items() if "KiB" in key} | {"server threads": 99}
    grown = [key for key, n in samples["after"].items() if n > limits[key]]
    say("\n".join(faults))
    print(f"{where}\n{options.arch}, {slots:g} slots, {options.clients} clients, {options.minutes:g} minutes")
    print(table([[at, *map(str, found.values())] for at, found in samples.items()], ["at", *settled]))
    print(f"{len(asked)} asked: {dict(results)}; {len(wrong)} differ; {len(faults)} faulty logs; grown: {grown}")
    print(f"{accepted:g} of {drafted:g} drafted tokens accepted")
    sys.exit(bool(wrong or faults or grown or not accepted or len(asked) > results["ok"] + results["cut"]))


if __name__ == "__main__":
    run_main(main)
