"""A real llama-server, from the `xllamacpp` wheel, in a process of its own; it ends with its standard input."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_READY_SECONDS = 180.0


@contextlib.contextmanager
def llama_server(
    model: Path, *, n_ctx: int = 2048, draft: Path | None = None, depth: int = 3, rates: Sequence[float] = ()
) -> Iterator[str]:
    """Yield the address of a server with one slot and one thread. With `draft` it speculates at that depth; `rates`
    force the acceptance of the first, second, ... drafted token."""
    options: dict[str, Any] = {
        "model": str(model), "n_ctx": n_ctx, "draft": str(draft or ""), "depth": depth,
        "rates": list(rates),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.support.llama_server", json.dumps(options)]
    root = Path(__file__).parent.parent.parent
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        try:
            if not (url := process.stdout.readline().decode().strip()):
                log.seek(0)
                raise RuntimeError(f"the llama-server did not start: {log.read().decode(errors='replace')[-2000:]}")
            _wait_until_ready(url)
            yield url
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def metrics(url: str) -> dict[str, float]:
    """Return the server's counters that have no labels."""
    lines = [line.split() for line in _get(f"{url}/metrics").splitlines() if not line.startswith("#")]
    return {words[0]: float(words[1]) for words in lines if len(words) == 2}


def _get(url: str) -> str:
    with _opener.open(url, timeout=180) as response:
        return response.read().decode()


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, urllib.error.URLError), _opener.open(f"{url}/health", timeout=5):
            return
        time.sleep(0.05)
    raise RuntimeError("the llama-server does not get ready")


def main() -> None:
    """Serve until standard input ends."""
    import importlib

    xllamacpp: Any = importlib.import_module("xllamacpp")

    options = json.loads(sys.argv[1])
    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0  # one that is free
    params.n_ctx = options["n_ctx"]
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics = True
    params.endpoint_slots = True
    if options["draft"]:
        speculative = params.speculative
        speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        speculative.draft.mparams.path = options["draft"]
        speculative.draft.n_max = options["depth"]
        if options["rates"]:
            speculative.synth_rates = options["rates"]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
