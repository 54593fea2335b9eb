"""The baselines: llama-bench and llama-server of the same llama.cpp, run as their own processes."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from build_llama import tool
from common import MeasureError

from cpuchat.backend.heads.server import free_port

STARTUP_SECONDS = 120.0


def llama_bench(
    model: Path,
    *,
    threads: int,
    n_prompt: int = 0,
    n_gen: int = 0,
    depth: int = 0,
    reps: int = 1,
    poll: int = 50,
    openmp: bool = False,
    env: dict[str, str] | None = None,
) -> float:
    """Median tok/s of one process run: prefill of `n_prompt` tokens, or `n_gen` tokens written after `depth` ones.

    Everything else is llama-bench's default (f16 KV, flash attention auto, mmap, repack, its own warm-up run), which
    is also cpuchat's.

    Raises:
        MeasureError: it failed, with the end of what it said.
    """
    command = [str(tool("llama-bench", openmp=openmp)), "-m", str(model), "-t", str(threads), "--poll", str(poll)]
    command += ["-p", str(n_prompt), "-n", str(n_gen), "-d", str(depth), "-r", str(reps), "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    if done.returncode:
        raise MeasureError(f"llama-bench ended with {done.returncode}: {done.stderr[-500:]}")
    (test,) = json.loads(done.stdout)
    return float(statistics.median(test["samples_ts"]))


@dataclass(frozen=True)
class Completion:
    """One streamed answer of llama-server.

    `first_ms` and `total_ms` from sending the request to the first text and to the end, as this process saw it; the
    rest is the server's own: `predicted_ms` from the first to the last token.
    """

    first_ms: float
    total_ms: float
    text: str
    prompt_n: int
    cache_n: int
    predicted_n: int
    predicted_ms: float
    draft_n: int
    draft_n_accepted: int

    @property
    def rate(self) -> float:
        """Decode tok/s as the server counts it: intervals between tokens, like ours."""
        return 1e3 * (self.predicted_n - 1) / self.predicted_ms


class LlamaServer:
    """A running llama-server with one slot and its prompt cache on."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        # The server hangs up after a stream; a connection kept for the next request would be a dead one.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=300.0, limits=limits)
        self._process = process

    def complete(self, prompt: str, max_tokens: int) -> Completion:
        """Continue the prompt greedily over HTTP, streaming.

        Raises:
            MeasureError: no answer, or no figures in it.
        """
        return self._stream({"prompt": prompt, "n_predict": max_tokens, "cache_prompt": True, "ignore_eos": True})

    def complete_tokens(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """Continue these tokens greedily, nothing reused, by the leanest of its samplers: the one likeliest token.

        Raises:
            MeasureError: no answer, or no figures in it.
        """
        lean = {"samplers": ["top_k"], "top_k": 1, "cache_prompt": False}
        return self._stream({"prompt": list(prompt), "n_predict": max_tokens, **lean})

    def _stream(self, request: dict[str, Any]) -> Completion:
        body = {"temperature": 0.0, "stream": True, **request}
        first_ms, text, timings = 0.0, [], None
        start = time.perf_counter()
        with self._client.stream("POST", "/completion", json=body) as response:
            if response.status_code != 200:
                raise MeasureError(f"llama-server: {response.status_code} {response.read()[:300]!r}")
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("content"):
                    if not text:
                        first_ms = 1e3 * (time.perf_counter() - start)
                    text.append(event["content"])
                timings = event.get("timings", timings)
        total_ms = 1e3 * (time.perf_counter() - start)
        if not timings or not text:
            raise MeasureError("llama-server sent no figures")
        return Completion(
            first_ms=first_ms,
            total_ms=total_ms,
            text="".join(text),
            prompt_n=timings["prompt_n"],
            cache_n=timings["cache_n"],
            predicted_n=timings["predicted_n"],
            predicted_ms=timings["predicted_ms"],
            draft_n=timings.get("draft_n", 0),
            draft_n_accepted=timings.get("draft_n_accepted", 0),
        )

    def raw_first_ms(self, route: str, body: dict[str, Any]) -> float:
        """Return ms from sending a request to the first byte of its first text: the least that a client can take."""
        start = time.perf_counter()
        with self._client.stream("POST", route, json=body) as response:
            for line in response.iter_lines():
                if '"content":"' in line or '"text":"' in line:
                    return 1e3 * (time.perf_counter() - start)
        raise MeasureError("llama-server sent no text")

    def busy(self) -> int:
        """Return how many slots compute."""
        return sum(slot["is_processing"] for slot in self._client.get("/slots").json())

    def wait_until_ready(self) -> None:
        """Raises MeasureError when it ends or does not get ready."""
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise MeasureError(f"llama-server ended with {self._process.returncode}")
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health").status_code == 200:
                    return
            time.sleep(0.2)
        raise MeasureError("llama-server does not get ready")

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def llama_server(
    model: Path,
    *,
    threads: int,
    n_ctx: int,
    log: Path,
    draft: Path | None = None,
    depth: int = 0,
    openmp: bool = False,
    extra: Sequence[str] = (),
) -> Iterator[LlamaServer]:
    """Start one on a free port of this machine's loopback; ended at the end.

    With `draft` it speculates: its `draft-simple` drafts `depth` tokens per verify pass, however unsure it is (its
    minimum probability is 0 by default), on the same threads. `extra` are further arguments.
    """
    port = free_port()
    command = [str(tool("llama-server", openmp=openmp)), "-m", str(model), "-t", str(threads), "-tb", str(threads)]
    command += ["-c", str(n_ctx)]
    command += ["-np", "1", "-b", "512", "-ub", "512", "--host", "127.0.0.1", "--port", str(port), "--offline", *extra]
    if draft is not None:
        command += ["--spec-type", "draft-simple", "-md", str(draft), "--spec-draft-n-max", str(depth)]
        command += ["-td", str(threads), "-tbd", str(threads), "--cache-ram", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        server = LlamaServer(f"http://127.0.0.1:{port}", process)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.close()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
