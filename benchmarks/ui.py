"""What the screen costs: CPU of a UI process that shows a streamed answer, in a real terminal (a pty of 120 by 40).

    python benchmarks/ui.py [--rate 60] [--tokens 1000] [--history 10000] [--runs 3] [--no-panel]

The process holds the transcript with a history and the telemetry panel. A scripted source writes mixed Markdown;
text reaches the transcript at 10 Hz, figures the panel at 4 Hz, as in the app. The output is drained by this process.

CPU seconds of the process, user and system, from the first to the last token, are divided by wall time. A stall is
how much later than asked a 5 ms timer in the same event loop came.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import select
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

PUMP_HZ = 10
PANEL_HZ = 4
TICK = 0.005

PROSE = (
    "Reading the prompt is a **matrix × matrix** product: each weight is fetched once and used for *every* token. "
    "Writing is `matrix × vector`, so every weight is fetched again for each token and the memory sets the pace. "
)
DOCUMENT = (
    "## How fast could it be?\n\n"
    + PROSE * 2
    + "\n\n1. Measure the **read bandwidth** of the machine.\n2. Divide it by the bytes per token.\n"
    "   - weights, without the embedding table\n   - the part of the KV cache that is in use\n3. Compare.\n\n"
    "```python\ndef ceiling(bandwidth: float, bytes_per_token: float) -> float:\n"
    '    """Tokens per second if nothing but memory counted."""\n    if bytes_per_token <= 0:\n'
    "        raise ValueError('no model')\n    return bandwidth / bytes_per_token  # no draft\n\n"
    "for name, size in {'Q8_0': 1.65e9, 'Q4_K_M': 0.99e9}.items():\n    print(name, ceiling(51e9, size))\n```\n\n"
    "| quantization | bytes per token | ceiling |\n|:--|--:|--:|\n| Q8_0 | 1.65 GB | 30.9 tok/s |\n"
    "| Q4_K_M | 0.99 GB | 51.5 tok/s |\n| F16 | 3.09 GB | 16.5 tok/s |\n\n> A draft model moves the ceiling.\n\n"
    + PROSE
)


def tokens(count: int) -> list[str]:
    """`count` pieces of Markdown of about four characters each."""
    pieces = re.findall(r"\s*\w{1,6}|\s*[^\w\s]{1,3}|\s+", DOCUMENT + "\n\n")
    return [pieces[index % len(pieces)] for index in range(count)]


def child(options: argparse.Namespace) -> None:
    """Run the UI, write one line "start" and one of figures to the pipe."""
    from textual.app import App, ComposeResult
    from textual.containers import Horizontal

    from cpuchat.protocol import ModelInfo, ModelLoaded, PrefillProgress, TextDelta
    from cpuchat.telemetry.meter import Meter
    from cpuchat.telemetry.process import process_memory
    from cpuchat.tui.chat.telemetry import TelemetryPanel
    from cpuchat.tui.markdown.transcript import Transcript, TranscriptMessage
    from cpuchat.tui.themes import OWN_VARIABLES

    pipe = options.pipe.open("w", buffering=1)

    class Host(App[None]):
        CSS = """
        Transcript, TelemetryPanel { border: round $foreground 40%; }
        TelemetryPanel { padding: 0 1; height: 100%; }
        """

        def get_theme_variable_defaults(self) -> dict[str, str]:
            return OWN_VARIABLES

        def compose(self) -> ComposeResult:
            self.transcript, self.panel = Transcript(), TelemetryPanel()
            with Horizontal():
                yield self.transcript
                if options.panel:
                    yield self.panel

        def on_mount(self) -> None:
            self.run_worker(self.stream())

        async def stream(self) -> None:
            transcript = self.transcript
            history: list[TranscriptMessage] = []
            for _ in range(options.history // 500):
                history.append(TranscriptMessage("user", "You", "How fast could it be?"))
                history.append(TranscriptMessage("assistant", "Model", "".join(tokens(500))))
            transcript.set_messages(history)
            await asyncio.sleep(3)  # all of the history is rendered and painted
            meter = Meter()
            model = ModelInfo(
                path="", name="m", architecture="", quantization="", n_params=0, size=0, n_ctx=32768, n_ctx_train=0,
                n_vocab=0, n_layer=0, n_threads=0,
            )  # fmt: skip
            meter.observe(ModelLoaded(model=model), 0)
            meter.observe(PrefillProgress(request_id=1, processed=64, total=64, cache_n=0), 0)
            late: list[float] = []
            ticker = asyncio.create_task(self.tick(late))
            if options.panel:
                self.set_interval(1 / PANEL_HZ, lambda: self.panel.show(meter.figures(), process_memory(os.getpid())))
            transcript.begin_answer("Model")
            pieces = tokens(options.tokens)
            print("start", file=pipe)
            began, cpu = time.perf_counter(), time.process_time()
            sent = 0
            while sent < len(pieces):
                await asyncio.sleep(1 / PUMP_HZ)
                now = time.perf_counter() - began
                due = min(len(pieces), int(now * options.rate))
                for number in range(sent, due):
                    delta = TextDelta(request_id=1, text="", predicted_n=number + 1, at_ms=1000 * number / options.rate)
                    meter.observe(delta, now)
                if due > sent:
                    transcript.append("".join(pieces[sent:due]))
                sent = due
            await asyncio.sleep(2 / PUMP_HZ)
            used, wall = time.process_time() - cpu, time.perf_counter() - began
            ticker.cancel()
            late.sort()
            result = {"cpu": used, "wall": wall, "p99": late[int(0.99 * len(late))], "max": late[-1]}
            print(json.dumps(result), file=pipe)
            self.exit()

        async def tick(self, late: list[float]) -> None:
            while True:
                asked = time.perf_counter() + TICK
                await asyncio.sleep(TICK)
                late.append(time.perf_counter() - asked)

    Host().run()


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One run in a pty of its own; adds "bytes" to the child's figures."""
    with tempfile.TemporaryDirectory() as folder:
        fifo = Path(folder, "figures")
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return _measure(options, fifo, reader)
        finally:
            os.close(reader)


def _measure(options: argparse.Namespace, fifo: Path, reader: int) -> dict[str, float]:
    import pexpect

    args = [__file__, "--child", "--pipe", str(fifo), "--rate", str(options.rate), "--tokens", str(options.tokens)]
    args += ["--history", str(options.history), *([] if options.panel else ["--no-panel"])]
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.setdefault("TEXTUAL_FPS", "30")  # as the app sets it
    terminal = pexpect.spawn(sys.executable, args, dimensions=(40, 120), env=environment, timeout=None)
    written, counting, pending = 0, False, b""
    result: dict[str, float] = {}
    while True:
        ready, _, _ = select.select([terminal.child_fd], [], [], 0.05)
        with contextlib.suppress(BlockingIOError):
            pending += os.read(reader, 65536)
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            counting = line == b"start"
            if not counting:
                result = json.loads(line)
        if terminal.child_fd in ready:
            try:
                size = len(os.read(terminal.child_fd, 65536))
            except OSError:  # Linux's way of telling that the other end is closed
                break
            written += size * counting
    terminal.close()
    if not result:
        raise SystemExit("the UI process ended before it was measured")
    return {**result, "bytes": written}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rate", type=float, default=60, help="tokens per second")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--history", type=int, default=10_000, help="tokens already in the chat")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-panel", dest="panel", action="store_false")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    runs = [measure(options) for _ in range(options.runs)]
    thousand = options.tokens / 1000
    columns = {
        "CPU, % of one core": [100 * run["cpu"] / run["wall"] for run in runs],
        "CPU-s per 1k tokens": [run["cpu"] / thousand for run in runs],
        "stall p99, ms": [1000 * run["p99"] for run in runs],
        "longest stall, ms": [1000 * run["max"] for run in runs],
        "to the terminal, KB per 1k tokens": [run["bytes"] / 1000 / thousand for run in runs],
    }
    setting = f"{options.rate:g} tok/s, {options.tokens} tokens after {options.history}"
    print(f"{setting}, {'with' if options.panel else 'without'} panel, {options.runs} runs")
    print("| figure | median | min | max |\n|---|---:|---:|---:|")
    for name, values in columns.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |")


if __name__ == "__main__":
    main()
