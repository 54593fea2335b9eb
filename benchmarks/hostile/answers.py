"""The real program while a server sends it an answer that is costly to show: one endless line, rows of a table, of
backticks, and a large paste.

    .venv/bin/python benchmarks/hostile/answers.py [--size 100000] [TEXT …]

For each text: how long a typed letter took to be on the screen, at most; the largest memory of the app's process; and
how long it took to quit in the middle of the answer. Asserted: it ends within 10 s, with exit code 0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pexpect
import psutil

PROGRAM = [sys.executable, "-P", "-m", "cpuchat.cli.main"]
QUIT = "\x11"
MOST_SECONDS = 10.0
PARTS = {
    "prose": "Some words of an ordinary paragraph, which ends here.\n\n",
    "one line": "a",
    "words": "some words ",
    "table": "| 12 | some words |\n",
    "backticks": "`\n",
    "backtick line": "` ",
    "wide table": "|" + "x|" * 500 + "\n",
    "code": "x = 1\n",
    "list": "- a\n",
    "quotes": "> a\n",
}
HEADS = {"table": "| a | b |\n|---|---|\n", "wide table": "|" + "a|" * 500 + "\n|" + "-|" * 500 + "\n",
         "code": "```python\n"}  # fmt: skip


def serve(text: str) -> ThreadingHTTPServer:
    """Serve one model, which answers with `text` in about 100 parts within 10 s, and then says nothing more."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            known = self.path == "/v1/models"
            body = json.dumps({"object": "list", "data": [{"id": "costly"}]} if known else {}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                step = max(1, len(text) // 100)
                for at in range(0, len(text), step):
                    delta = {"choices": [{"index": 0, "delta": {"content": text[at : at + step]}}]}
                    self.wfile.write(b"data: " + json.dumps(delta).encode() + b"\n\n")
                    time.sleep(0.1)
                while True:
                    self.wfile.write(b": still here\n\n")
                    time.sleep(0.5)
            except OSError:
                pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class App:
    def __init__(self, url: str, folder: Path) -> None:
        (folder / "config").mkdir()
        (folder / "config" / "config.toml").write_text("[hardware]\nprobe = false\n", encoding="utf-8")
        places = {f"CPUCHAT_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "CACHE")}
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment = {**kept, **places, "HOME": str(folder), "TERM": "xterm-256color"}
        self.child = pexpect.spawn(
            PROGRAM[0], [*PROGRAM[1:], "--server", url], dimensions=(24, 80), env=environment, timeout=None, echo=False
        )
        self.child.delaybeforesend = None
        self.process = psutil.Process(self.child.pid)
        self.most_bytes = 0

    def wait_for(self, wanted: bytes, seconds: float) -> float:
        """Read until `wanted` comes; returns the seconds that it took, `seconds` if it did not come."""
        started, seen = time.monotonic(), b""
        while (left := started + seconds - time.monotonic()) > 0:
            try:
                seen = seen[-100:] + self.child.read_nonblocking(65_536, timeout=min(left, 0.05))
            except pexpect.TIMEOUT:
                pass
            self.most_bytes = max(self.most_bytes, self.process.memory_info().rss)
            if wanted in seen:
                return time.monotonic() - started
        return seconds

    def quit(self) -> float:
        started = time.monotonic()
        self.child.send(QUIT)
        while time.monotonic() - started < 60:
            try:
                self.child.read_nonblocking(65_536, timeout=1)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                break
        else:
            self.process.send_signal(signal.SIGKILL)
        taken = time.monotonic() - started
        self.child.close(force=True)
        return taken


def measure(text: str) -> tuple[float, int, float, int | None]:
    """Return the worst delay of a key and the time to quit in seconds, the peak in bytes, and the exit code."""
    server = serve(text)
    with tempfile.TemporaryDirectory(prefix="cpuchat-hostile-") as name:
        app = App(f"http://127.0.0.1:{server.server_address[1]}", Path(name))
        try:
            app.wait_for(b"costly", 60)
            app.wait_for(b"Enter sends", 60)
            app.child.send("go\r")
            app.wait_for(b"Esc", 60)
            worst, until = 0.0, time.monotonic() + 12
            for letter in "QZXJQZXJQZXJQZXJQZXJQZXJ":  # none that the texts have
                app.child.send(letter)
                worst = max(worst, app.wait_for(letter.encode(), 30))
                app.wait_for(b"\0", 0.4)
                if time.monotonic() > until:
                    break
            taken = app.quit()
        finally:
            app.child.close(force=True)
            server.shutdown()
    return worst, app.most_bytes, taken, app.child.exitstatus


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help=", ".join(PARTS))
    parser.add_argument("--size", type=int, default=100_000)
    given = parser.parse_args()
    faults = 0
    print(f"{'text':14} {'worst key':>9} {'peak':>8} {'quit':>7}")
    for name in given.texts or PARTS:
        part = PARTS[name]
        worst, peak, taken, code = measure(HEADS.get(name, "") + part * (given.size // len(part)))
        fault = code != 0 or taken > MOST_SECONDS
        faults += fault
        print(f"{name:14} {worst:7.2f} s {peak / 1e6:5.0f} MB {taken:5.2f} s{'  FAULT' if fault else ''}", flush=True)
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
