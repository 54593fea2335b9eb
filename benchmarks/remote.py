"""A model on a llama-server of this machine: what the client shows, and what it costs.

    python benchmarks/remote.py [--quick] [--rounds N] [--model 0.5b:Q4_K_M] [--threads N]

- tok/s shown against the server's own timings of the same answers (asked for by another client right after; the text
  is the same), at the end and live
- time to the first token of a prompt that the server has cached, against a bare HTTP client, in turn; and what the
  whole app adds to that in a terminal, from Enter to the request at the server, and from the first text to the screen
- from Esc to the idle slot of the server, in the middle of an answer, and of a prefill in large and small batches
- acceptance shown for a pair of a known one (synthetic, depth 1, so that each drafted token counts once)

Takes about 9 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from pathlib import Path

import models
from baselines import LlamaServer, llama_server
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say
from pairs import Shapes, known, typical_texts
from pairs import as_text as text_of
from product import GREEDY, answer, default_threads
from proxy import Proxy
from terminal import ENTER, NEW_CHAT, PASTE, Terminal, app

from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.config.servers import ServerModel
from cpuchat.protocol.messages import Failed, Generate, LoadOptions, PrefillProgress, TextDelta
from cpuchat.telemetry.meter import Meter

N_CTX = 4096
ALPHA, PAIR_TOKENS = 0.7, 257
FIRST_TEXT = re.compile(rb'"content":("(?:[^"\\]|\\.)+")')


async def connected(server: LlamaServer) -> RemoteBackend:
    """Raises MeasureError when the server is not one."""
    backend = RemoteBackend()
    async for event in backend.load(ServerModel(server.url), LoadOptions()):
        if isinstance(event, Failed):
            raise MeasureError(f"{event.message} {event.hint}")
    return backend


async def _shown(backend: RemoteBackend, prompt: str, tokens: int) -> tuple[float, float]:
    """Return (decode tok/s at the end, median of the live tok/s) as the panel shows them."""
    meter, live = Meter(), []
    meter.request_started(time.monotonic())
    async for event in backend.generate(Generate(prompt=prompt, sampling=GREEDY, max_tokens=tokens, ignore_eos=True)):
        now = time.monotonic()
        meter.observe(event, now)
        if (
            isinstance(event, TextDelta)
            and (rate := meter.figures(now).live_tok_s.value)
            and event.predicted_n > tokens // 2
        ):
            live.append(rate)
    final = meter.figures().decode_tok_s.value
    if not final or not live:
        raise MeasureError("no figures")
    return final, sorted(live)[len(live) // 2]


def speed(runner: asyncio.Runner, server: LlamaServer, backend: RemoteBackend, rounds: int, tokens: int) -> list[Row]:
    prompt = models.words(64, salt=3)
    live: list[float] = []

    def ours() -> float:
        final, now = runner.run(_shown(backend, prompt, tokens))
        live.append(now)
        return final

    def theirs() -> float:
        return server.complete(prompt, tokens).rate

    theirs()
    runs = alternate(rounds, {"shown": ours, "server": theirs})
    note = "the two are different answers of the same text: a difference is the machine's noise, too"
    return [
        Row("tok/s shown, whole answer", "tok/s", runs["shown"], runs["server"], Target(0.99), note),
        Row("tok/s shown live", "tok/s", live, runs["server"], Target(0.97)),
    ]


def own_timings(runner: asyncio.Runner, backend: RemoteBackend, tokens: int) -> Row:
    """Return the rate shown against that of the `timings` of the very answer that it is shown for."""
    seen: list[float] = []
    adapter = backend._adapter
    assert adapter is not None
    original = adapter.chunk

    def spy(data: dict) -> object:
        if timings := data.get("timings"):
            seen.append(timings["predicted_per_second"])
        return original(data)

    adapter.chunk = spy  # type: ignore[method-assign]
    try:
        shown, _ = runner.run(_shown(backend, models.words(64, salt=4), tokens))
    finally:
        adapter.chunk = original  # type: ignore[method-assign]
    return Row("tok/s shown, off the server's own by", "%", [100 * abs(shown / seen[-1] - 1)], target=Target(1, False))


def first_token(runner: asyncio.Runner, server: LlamaServer, backend: RemoteBackend, rounds: int, history: int) -> Row:
    prompt = models.words(history, salt=5)
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0.0, "stream": True, "cache_prompt": True}

    def ours() -> float:
        return runner.run(answer(backend, prompt, 2, to_the_end=False)).first_ms

    def theirs() -> float:
        return server.raw_first_ms("/v1/completions", body)

    theirs(), ours()
    runs = alternate(rounds, {"ours": ours, "bare": theirs}, settle=0.1)
    added = [a - b for a, b in zip(runs["ours"], runs["bare"], strict=True)]
    return Row("time to the first token that the client adds", "ms", added, target=Target(15, False))


class Tap(Proxy):
    """When the newest request for an answer had arrived, and when its first text had, and which text that was."""

    def __init__(self, port: int) -> None:
        self.asked = self.answered = 0.0
        self.text = ""
        super().__init__(port)

    def passed(self, data: bytes, to_target: bool) -> None:
        now = time.perf_counter()
        if to_target and data.startswith(b"POST /v1/chat/completions "):
            self.asked, self.answered = now, 0.0
        elif self.asked and not self.answered and not to_target and (found := FIRST_TEXT.search(data)):
            self.text = json.loads(found[1]).strip()
            self.answered = now


def in_the_app(server: LlamaServer, rounds: int) -> list[Row]:
    """Return what the whole app adds in a terminal, to the second message of a chat."""
    tap = Tap(int(server.url.rpartition(":")[2]))
    config = "[sampling]\ntemperature = 0.0\n[chat]\nmax_tokens = 2\n"
    asked: list[float] = []
    shown: list[float] = []

    def send(terminal: Terminal, message: str) -> float:
        terminal.type(PASTE.format(message))
        terminal.wait_for(lambda screen: message in screen)
        terminal.skip(1.0)
        tap.asked = tap.answered = 0.0
        pressed = time.perf_counter()
        terminal.type(ENTER)
        return pressed

    with app("--server", f"http://127.0.0.1:{tap.port}", config=config) as (terminal, _):
        terminal.wait_for(lambda screen: f"{N_CTX // 1024}k ctx" in screen)
        for number in range(rounds):
            terminal.type(NEW_CHAT * (number > 0))
            send(terminal, models.words(8, salt=40 + 2 * number).strip())
            terminal.drain(lambda: tap.answered > 0)
            terminal.skip(1.0)
            pressed = send(terminal, models.words(8, salt=41 + 2 * number).strip())
            # All answers begin with the same text: what comes before it is the same.
            seen = terminal.shown_at(lambda screen: screen.count(tap.text) == 2, 4.0)
            asked.append(1e3 * (tap.asked - pressed))
            shown.append(1e3 * (seen - tap.answered))
    tap.close()
    both = [a + b for a, b in zip(asked, shown, strict=True)]
    return [
        Row("in the app: from Enter to the request at the server", "ms", asked),
        Row("in the app: from the first text to the screen", "ms", shown),
        Row("time to the first token that the app adds", "ms", both, target=Target(15, False)),
    ]


async def _stop(server: LlamaServer, backend: RemoteBackend, prompt: str, in_prefill: bool) -> float:
    cancelled = 0.0
    async for event in backend.generate(Generate(prompt=prompt, sampling=GREEDY, ignore_eos=True)):
        reached = isinstance(event, PrefillProgress) if in_prefill else isinstance(event, TextDelta)
        if reached and not cancelled:
            cancelled = time.perf_counter()
            await backend.cancel()
            watching = asyncio.create_task(asyncio.to_thread(_idle_after, server, cancelled))
    if not cancelled:
        raise MeasureError("nothing to stop")
    return await watching


def _idle_after(server: LlamaServer, since: float) -> float:
    while server.busy():
        if time.perf_counter() - since > 30:
            raise MeasureError("the server does not stop")
        time.sleep(0.005)
    return time.perf_counter() - since


def stops(runner: asyncio.Runner, server: LlamaServer, backend: RemoteBackend, rounds: int, batch: int = 0) -> Row:
    """Return the time to stop an answer, or (`batch` of the server) a prefill: it notices a closed connection only
    between two batches, so one of 512 tokens has no target."""
    prompts = [models.words(2000 if batch else 30, salt=20 + batch + n) for n in range(rounds)]
    taken = [runner.run(_stop(server, backend, prompt, bool(batch))) for prompt in prompts]
    where = f"in a prefill of 2,000 tokens, batches of {batch}" if batch else "in an answer"
    return Row(f"from Esc to the idle slot, {where}", "s", taken, target=None if batch > 64 else Target(0.5, False))


def small_batches(runner: asyncio.Runner, file: Path, threads: int, rounds: int, log: Path) -> Row:
    """Return the time to stop a prefill of a server with small batches."""
    extra = ("-b", "64", "-ub", "64")
    with llama_server(file, threads=threads, n_ctx=N_CTX, log=log, extra=extra) as server:
        backend = runner.run(connected(server))
        row = stops(runner, server, backend, rounds, 64)
        runner.run(backend.close())
    return row


def acceptance(runner: asyncio.Runner, threads: int, quick: bool, log: Path) -> Row:
    shapes = Shapes(target="0.5b", layers=2)
    tokens = 65 if quick else PAIR_TOKENS
    [text] = typical_texts(shapes.n_vocab, ALPHA, tokens, 1, (1,))
    files = shapes.target_file("Q8_0"), shapes.draft_file(ALPHA)
    with llama_server(files[0], threads=threads, n_ctx=2048, log=log, draft=files[1], depth=1) as server:
        backend = runner.run(connected(server))
        done = runner.run(answer(backend, text_of(text.prompt), tokens, to_the_end=False))
        runner.run(backend.close())
    timings, wanted = done.timings, known(text, 1).acceptance
    if not timings.draft_n:
        raise MeasureError("nothing was drafted")
    shown = timings.draft_n_accepted / timings.draft_n
    note = f"shown {shown:.3f} of {timings.draft_n} drafted, known {wanted:.3f}; per pass {timings.tokens_per_pass:.2f}"
    return Row(
        "acceptance shown, off the known one by", "", [abs(shown - wanted)], target=Target(0.02, False), note=note
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="0.5b:Q4_K_M")
    parser.add_argument("--threads", type=int, default=0, help="of the server (0: cpuchat's choice)")


def main() -> None:
    options = arguments(__doc__, _options)
    where, file = machine(), models.model(*options.model.split(":"))
    threads, quick = options.threads or default_threads(), options.quick
    rounds = options.rounds or (1 if quick else 7)
    tokens, stopped = 32 if quick else 256, 1 if quick else 7
    say(f"{file.name}, {threads} threads")
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder, asyncio.Runner() as runner:
        log = Path(folder) / "server.log"
        with llama_server(file, threads=threads, n_ctx=N_CTX, log=log, extra=("--metrics",)) as server:
            backend = runner.run(connected(server))
            rows = [own_timings(runner, backend, tokens), *speed(runner, server, backend, rounds, tokens)]
            rows.append(first_token(runner, server, backend, 3 if quick else 15, 200 if quick else 1000))
            rows += in_the_app(server, 2 if quick else 10)
            rows += [stops(runner, server, backend, stopped, batch) for batch in (0, 512)]
            runner.run(backend.close())
        rows.append(small_batches(runner, file, threads, stopped, log))
        rows.append(acceptance(runner, threads, quick, log))
    report("remote", where, rows, quick=quick, remarks=[f"{file.name}, llama-server with {threads} threads"])


if __name__ == "__main__":
    run_main(main)
