"""`cpuchat serve` against llama-server, and under clients that hang up.

    python benchmarks/serve.py [--quick] [--rounds N] [--only decode,ttft,turns,stops,clients] [--threads N]

decode: 128 tokens of /v1/completions, streamed, same file and threads, no drafts; each server's own `timings`, and
tok/s as the client sees them. ttft: the second turn after 2,000 tokens. turns: the same for two conversations in turn,
each of which has to be kept while the other is answered. stops: how long the engine still works after a client has hung
up, in a prefill of 2,000 tokens, while conversations are exchanged, and in decoding. clients: 1,000 requests of 8
clients, half of them cut at a random moment; workers lost, slots not released, memory of server and worker at the end
against that after the first two fifths.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import models
import psutil
from baselines import llama_server
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say
from product import default_threads

PARTS = ("decode", "ttft", "turns", "stops", "clients")
TOKENS, HISTORY, NEW, FIRST_ANSWER = 128, 2000, 32, 16
N_CTX = 4096
REQUESTS, CLIENTS = 1000, 8
SETTLED = 0.4
"""Share of the requests after which memory should not grow: kept KV caches have reached their limit."""
KEPT_GB = 0.05
"""For the KV of conversations, in `clients`: small, so that it is full soon."""
STOPPED_SECONDS = 0.5


@dataclass(frozen=True)
class Seen:
    """One streamed answer as the client saw it, with the server's own figures."""

    first_ms: float
    tok_s: float
    text: str
    prompt_n: int
    predicted_per_second: float


@contextlib.contextmanager
def our_server(
    model: Path, *arguments: str, folder: Path, kept_gb: float = 2.0, own_cache: bool = False
) -> Iterator[tuple[str, psutil.Process]]:
    """Run `cpuchat serve` on a free port; yields its address and process. `own_cache`: states are in `folder`, too.

    Raises:
        MeasureError: it does not start.
    """
    config = folder / "config"
    config.mkdir(parents=True, exist_ok=True)
    (config / "config.toml").write_text(f"[engine]\nsaved_kv_gb = {kept_gb}\n")
    env = {**os.environ, "CPUCHAT_CONFIG_DIR": str(config), "CPUCHAT_DATA_DIR": str(folder / "data")}
    env |= {"CPUCHAT_CACHE_DIR": str(folder / "cache")} if own_cache else {}
    command = [sys.executable, "-m", "cpuchat.cli.main", "serve", str(model), "--port", "0", "--quiet", *arguments]
    with (folder / "server.log").open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env)
    try:
        assert process.stdout is not None
        found = re.search(rb"http://\S+(?=/v1)", process.stdout.readline())
        if found is None:
            raise MeasureError(f"cpuchat serve did not start: {(folder / 'server.log').read_text()[-500:]}")
        yield found[0].decode(), psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def complete(url: str, prompt: str, tokens: int) -> Seen:
    """Stream one greedy completion of exactly `tokens` tokens. Raises MeasureError."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    first = last = 0.0
    text: list[str] = []
    timings = None
    start = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300, trust_env=False) as response:
        if response.status_code != 200:
            raise MeasureError(f"{url}: {response.status_code} {response.read()[:300]!r}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            timings = event.get("timings", timings)
            for choice in event["choices"]:
                if choice["text"]:
                    last = time.perf_counter()
                    first = first or last
                    text.append(choice["text"])
    if timings is None or timings["predicted_n"] != tokens:
        raise MeasureError(f"{url}: not {tokens} tokens: {timings}")
    return Seen(
        first_ms=1e3 * (first - start),
        tok_s=(tokens - 1) / (last - first) if last > first else 0.0,
        text="".join(text),
        prompt_n=timings["prompt_n"],
        predicted_per_second=timings["predicted_per_second"],
    )


@contextlib.contextmanager
def both(file: Path, threads: int) -> Iterator[dict[str, str]]:
    """Run both servers of one file; yields their addresses."""
    options = ("--threads", str(threads), "--ctx", str(N_CTX), "--drafters", "off")
    with (
        tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder,
        our_server(file, *options, folder=Path(folder)) as (ours, _),
        llama_server(file, threads=threads, n_ctx=N_CTX, log=Path(folder) / "llama.log") as theirs,
    ):
        yield {"cpuchat": ours, "llama-server": theirs.url}


def decode(file: Path, threads: int, rounds: int, tokens: int) -> list[Row]:
    prompt = models.words(32, salt=3)
    with both(file, threads) as urls:
        for url in urls.values():  # warm up: not counted
            complete(url, prompt, 8)

        def side(name: str) -> dict[str, float]:
            seen = complete(urls[name], prompt, tokens)
            return {"own": seen.predicted_per_second, "seen": seen.tok_s}

        runs = alternate(rounds, {name: lambda name=name: side(name) for name in urls}, settle=0.5)
    ours, theirs = runs["cpuchat"], runs["llama-server"]
    what = f"decode, {file.stem}"
    return [
        Row(what, "tok/s", [r["own"] for r in ours], [r["own"] for r in theirs], Target(0.97)),
        Row(f"{what}, seen by the client", "tok/s", [r["seen"] for r in ours], [r["seen"] for r in theirs]),
    ]


def second_turn(file: Path, threads: int, rounds: int, history: int, talks: int = 1) -> Row:
    """First token of a further turn; with several `talks`, another one was answered just before."""
    prompts = [models.words(history, salt=1 + number) for number in range(talks)]
    evaluated = {"cpuchat": set[int](), "llama-server": set[int]()}
    counts = {"cpuchat": 0, "llama-server": 0}
    with both(file, threads) as urls:
        first = {name: [complete(url, prompt, FIRST_ANSWER).text for prompt in prompts] for name, url in urls.items()}

        def side(name: str, *, counted: bool = True) -> float:
            talk = counts[name] % talks
            turn = prompts[talk] + first[name][talk] + models.words(NEW, salt=100 + counts[name])
            counts[name] += 1
            seen = complete(urls[name], turn, 4)
            if counted:
                evaluated[name].add(seen.prompt_n)
            return seen.first_ms

        for name in urls:  # they also evaluate the last tokens of the first answers: not counted
            for _ in prompts:
                side(name, counted=False)
        runs = alternate(rounds, {name: lambda name=name: side(name) for name in urls}, settle=0.5)
    note = f"evaluated tokens per turn: cpuchat {evaluated['cpuchat']}, llama-server {evaluated['llama-server']}"
    if evaluated["cpuchat"] != evaluated["llama-server"]:
        note += " - NOT THE SAME WORK"
    which = "a second turn" if talks == 1 else f"{talks} conversations in turn"
    what = f"first token of {which}, {history} tokens, {file.stem}"
    return Row(what, "ms", runs["cpuchat"], runs["llama-server"], Target(1.1, False), note)


def slot(url: str) -> dict:
    return httpx.get(f"{url}/slots", timeout=30, trust_env=False).json()[0]


def metric(url: str, name: str) -> float:
    found = re.search(rf"^cpuchat_{name} (\S+)$", httpx.get(f"{url}/metrics", trust_env=False).text, re.M)
    return float(found[1]) if found else 0.0


def until_idle(url: str) -> float:
    """Seconds until the slot is idle. Raises MeasureError when it does not get idle."""
    start = time.perf_counter()
    while slot(url)["is_processing"]:
        if time.perf_counter() - start > 30:
            raise MeasureError("the slot does not get idle")
        time.sleep(0.005)
    return time.perf_counter() - start


def _request(url: str, dice: random.Random, cut: bool) -> None:
    """Send a request of one of a few conversations; cut it after a random number of lines or before the first."""
    prompt = models.words(8 + 4 * dice.randrange(8), salt=dice.randrange(24))
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True, "ignore_eos": True}
    lines, wait = dice.randrange(4), dice.random()
    timeout = httpx.Timeout(120, read=wait) if cut and not lines else 120
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=timeout, trust_env=False) as response,
    ):
        if response.status_code != 200:
            raise MeasureError(f"{response.status_code} {response.read()[:300]!r}")
        for number, _ in enumerate(response.iter_lines()):
            if cut and number >= lines:
                return


def clients(file: Path, threads: int, requests: int) -> list[Row]:
    """Raises MeasureError when a request fails that was not cut."""
    options = ("--threads", str(threads), "--ctx", str(N_CTX), "--queue", str(2 * CLIENTS), "--drafters", "off")
    with (
        tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder,
        our_server(file, *options, folder=Path(folder), kept_gb=KEPT_GB) as (url, server),
    ):
        (worker,) = (p for p in server.children() if "cpuchat.worker" in " ".join(p.cmdline()))
        settled: list[tuple[int, int]] = []
        done, lock = 0, threading.Lock()

        def client(number: int) -> None:
            nonlocal done
            dice = random.Random(number)
            for turn in range(requests // CLIENTS):
                _request(url, dice, cut=bool((turn + number) % 2))
                with lock:
                    done += 1
                    if done == int(SETTLED * requests):
                        settled.append((server.memory_info().rss, worker.memory_info().rss))
                    if done % 100 == 0:
                        say(f"  {done} of {requests} requests, server {server.memory_info().rss / 1e6:.0f} MB")

        with ThreadPoolExecutor(CLIENTS) as threads_:
            for future in [threads_.submit(client, number) for number in range(CLIENTS)]:
                future.result()
        until_idle(url)
        now, grown = slot(url), settled[0]
        complete(url, models.words(20, salt=1), 4)
        lost = 0.0 if worker.is_running() and metric(url, "model_loads_total") == 1 else 1.0
        leaked = float(now["is_processing"]) + now["n_waiting"]
        memory = [server.memory_info().rss / grown[0], worker.memory_info().rss / grown[1]]
        descriptors = server.num_fds()
    what = f"{requests} requests, {CLIENTS} clients, half of them cut: "
    return [
        Row(f"{what}workers lost", "", [lost], target=Target(0, False)),
        Row(f"{what}slots not released", "", [leaked], target=Target(0, False)),
        Row(f"{what}memory of the server, end ÷ after {SETTLED:.0%}", "×", [memory[0]], target=Target(1.05, False)),
        Row(f"{what}memory of the worker, end ÷ after {SETTLED:.0%}", "×", [memory[1]], target=Target(1.05, False)),
        Row(f"{what}open descriptors at the end", "", [descriptors]),
    ]


def stops(file: Path, threads: int, times: int, history: int) -> list[Row]:
    """Seconds until the engine is idle after a client has hung up: in a prefill, in the request that exchanges two
    conversations, in an endless answer.
    """
    options = ("--threads", str(threads), "--ctx", str(N_CTX), "--drafters", "off")
    talks = [models.words(history, salt=1 + number) for number in range(2)]
    found: dict[str, list[float]] = {"in prefill": [], "exchanging conversations": [], "in decoding": []}
    with (
        tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder,
        our_server(file, *options, folder=Path(folder)) as (url, _),
    ):
        for talk in talks:
            complete(url, talk, FIRST_ANSWER)
        for number in range(times):
            found["in prefill"].append(_stop(url, models.words(history, salt=200 + number), lines=0))
            complete(url, talks[1], 4)
            found["exchanging conversations"].append(_stop(url, talks[0] + models.words(NEW, salt=400), lines=None))
            found["in decoding"].append(_stop(url, models.words(40, salt=7), lines=1 + number % 5))
    what = f"engine idle after a client hung up, {file.stem}, {history} tokens: "
    return [
        Row(f"{what}{where}", "s", seconds, target=Target(STOPPED_SECONDS, False)) for where, seconds in found.items()
    ]


def _stop(url: str, prompt: str, lines: int | None) -> float:
    """Hang up after `lines` of an endless answer: 0 as soon as its response begins, which is when the prompt is about
    to be evaluated; None: 5 ms after the request.
    """
    body = {"prompt": prompt, "temperature": 0, "stream": True, "ignore_eos": True}
    timeout = httpx.Timeout(60, read=0.005) if lines is None else 60
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=timeout, trust_env=False) as response,
    ):
        texts = response.iter_lines()
        for _ in range(lines or 0):
            next(texts)
    return until_idle(url)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts: {','.join(PARTS)}")
    parser.add_argument("--models", default="0.5b:Q4_K_M,1.5b:Q8_0", help="shape:quantization, for decode and ttft")
    parser.add_argument("--threads", type=int, default=0, help="for both sides (0: cpuchat's choice)")


def main() -> None:
    options = arguments(__doc__, _options)
    where, parts = machine(), options.only.split(",")
    threads, quick = options.threads or default_threads(), options.quick
    history = 300 if quick else HISTORY
    rows: list[Row] = []
    for name in options.models.split(",")[: 1 if quick else None]:
        file = models.model(*name.split(":"))
        if "decode" in parts:
            rows += decode(file, threads, options.rounds or (2 if quick else 9), 32 if quick else TOKENS)
        if "ttft" in parts:
            rows.append(second_turn(file, threads, options.rounds or (2 if quick else 9), history))
        if "turns" in parts:
            rows.append(second_turn(file, threads, options.rounds or (2 if quick else 9), history, talks=2))
    if "stops" in parts:
        shape = "0.5b:Q4_K_M" if quick else "1.5b:Q8_0"
        rows += stops(models.model(*shape.split(":")), threads, 3 if quick else 10, history)
    if "clients" in parts:
        rows += clients(Path("demo"), threads, 80 if quick else REQUESTS)
    report("serve", where, rows, quick=quick, remarks=[f"{threads} threads on both sides, no drafts"])


if __name__ == "__main__":
    run_main(main)
