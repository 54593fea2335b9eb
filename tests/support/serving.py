"""Starts `cpuchat serve` as a user does, and watches it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil

from tests.cli.program import COMMAND, HANG_GUARD
from tests.support.cores import ON_ONE_CPU

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

PLAIN = ("--drafters", "off")


class Server:
    """A running server. `folder` holds its settings, data and caches."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, folder: Path, token: str = "") -> None:
        self.process = process
        self.url = url
        self.folder = folder
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=url, timeout=HANG_GUARD, headers=headers, trust_env=False)
        self.token = token

    @functools.cached_property
    def openai(self) -> OpenAI:
        from openai import OpenAI  # slow

        return OpenAI(base_url=f"{self.url}/v1", api_key=self.token or "none", max_retries=0)

    @functools.cached_property
    def anthropic(self) -> Anthropic:
        from anthropic import Anthropic  # slow

        return Anthropic(base_url=self.url, api_key=self.token or "none", max_retries=0)

    def post(self, body: object, path: str = "/v1/chat/completions") -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str, **labels: str) -> float | None:
        """Return a sample of /metrics, None where there is none."""
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        pattern = rf"^cpuchat_{name}{re.escape('{' + inside + '}') if inside else ''} (\S+)$"
        found = re.search(pattern, self.http.get("/metrics").text, re.M)
        return float(found[1]) if found else None

    def wait_for(self, **requests: int) -> None:
        """Wait until so many requests are `running` and `waiting`."""
        deadline = time.monotonic() + HANG_GUARD
        while any(self.metric(f"requests_{name}") != n for name, n in requests.items()):
            assert time.monotonic() < deadline, requests
            time.sleep(0.01)

    @property
    def worker(self) -> psutil.Process:
        """Return the inference process."""
        (found,) = (p for p in psutil.Process(self.process.pid).children() if "cpuchat.worker" in " ".join(p.cmdline()))
        return found


def wait_until_gone(process: psutil.Process) -> None:
    """Wait until a process has ended: a killed one takes a while beside other load."""
    deadline = time.monotonic() + HANG_GUARD
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, process
            time.sleep(0.01)


def chat(text: str, **more: object) -> dict:
    """Return a greedy request."""
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16, **more}


@contextlib.contextmanager
def server(model: Path, folder: Path, *arguments: str, token: str = "", ctx: int = 4096) -> Iterator[Server]:
    """Run a server on a free port. `token` is sent with every request."""
    env = {**os.environ, **{f"CPUCHAT_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE")}}
    (folder / "cache").mkdir(parents=True, exist_ok=True)
    command = [*COMMAND, "serve", str(model), "--port", "0", "--ctx", str(ctx), *PLAIN, *arguments]
    command += ["--cores", ON_ONE_CPU.cores]
    with (folder / "stderr.txt").open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        found = re.search(r"http://\S+(?=/v1)", line)
        assert found, (line, (folder / "stderr.txt").read_text())
        running = Server(process, found[0], folder, token)
        with running.http:
            yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(HANG_GUARD)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
