"""Model files made to harm: what reading, showing, loading and answering make of 2,000 mutated GGUFs.

    python benchmarks/hostile/ggufs.py [--quick] [--files N] [--loads N] [--seed N]

Sound files (small ones of seven architectures, the demo draft, and one with every kind of value) have fields of their
headers replaced, cut, moved, filled with escape sequences, or are cut short. Each is given to `cpuchat models show` in
one warm process; a sample of those that are read is loaded by a real worker and answers with four tokens.
Contradictions on which llama.cpp aborts end the worker, which says so; the next load starts another.

Bars: no traceback and no other end than an answer or a typed error; nothing that takes over 20 s; no file written
outside the folders of cpuchat; at most 1 GB of memory; no control character on the terminal. Exit status 1 when one
does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import re
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common import run_main, say, table
from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError
from cpuchat.cli.main import main as cpuchat
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.gguf.header import read_header
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import Failed, Generate, GenerationFinished, LoadOptions, Message, ModelLoaded
from tests.models.gguf.fields import fields, patched
from tests.models.gguf.test_header import write_reference
from tests.support.tiny_gguf import write_tiny_gguf

N_FILES, N_LOADS = 2000, 300
SECONDS, MEMORY = 20.0, 1_000_000_000
ARCHITECTURES = ("llama", "mamba", "jamba", "lfm2", "qwen35", "gemma3", "deepseek2")
EXTREMES = (0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)
NASTY = (b"\x1b[2J\x1b]52;c;aGk=\x07", b"\xff\xfe\xb8q", b"\0" * 64, "\u202e\u2066".encode(), b"../../../../etc/passwd",
         b"{{ ''.__class__ }}", b"{% for a in range(10**9) %}{% endfor %}", b"<|im_end|>")  # fmt: skip
_UNTYPED = re.compile(r"Traceback|This is a bug|(?<!['\w])b'")  # and the repr of bytes
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def sound_files(folder: Path) -> list[bytes]:
    """The files that are mutated."""
    files = [write_tiny_gguf(folder / f"{arch}.gguf", arch=arch) for arch in ARCHITECTURES]
    return [
        file.read_bytes()
        for file in (*files, write_reference(folder / "every.gguf"), paths.demo_dir() / DEMO_FILES["demo-draft"])
    ]


def mutated(content: bytes, known: dict[str, list[tuple[int, int]]], rng: random.Random) -> bytes:
    """One to four changes. Places are those of the sound file; behind a cut they hit anything."""
    end = max(at for at, _ in known["offset"])
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        kind = rng.choice((*known, "string", "value", "flip", "cut", "insert", "short"))
        if kind in known:
            at, size = rng.choice(known[kind])
            if kind == "string":
                content = content[:at] + (rng.choice(NASTY) * (size // 4 + 1))[:size] + content[at + size :]
            else:
                old = int.from_bytes(content[at : at + size], "little")
                content = patched(content, at, size, rng.choice((*EXTREMES, old + 1, max(old - 1, 0), old * 2)))
            continue
        at = rng.randrange(4, end)
        if kind == "flip" and at < len(content):
            content = patched(content, at, 1, content[at] ^ 1 << rng.randrange(8))
        elif kind == "cut":
            content = content[:at] + content[at + rng.randint(1, 64) :]
        elif kind == "insert":
            content = content[:at] + rng.choice(NASTY)[: rng.randint(1, 16)] + content[at:]
        elif kind == "short":
            content = content[: rng.randrange(len(content) + 1)]
    return content


# --- the process that reads ------------------------------------------------------------------------------------------


def serve(allowed: str) -> None:
    """Answer each path on standard input with one line of JSON about `cpuchat models show PATH`."""
    written: set[str] = set()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            mode, flags = arguments[1], arguments[2]
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR)
            if writes and not str(Path(os.fsdecode(arguments[0])).absolute()).startswith((allowed, "/dev/")):
                written.add(os.fsdecode(arguments[0]))

    sys.addaudithook(audit)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = cpuchat(["models", "show", line.rstrip("\n")])
        status = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
        memory = int(status["VmHWM"].split()[0]) * 1024
        try:
            read_header(Path(line.rstrip("\n")))
            loadable = True
        except CpuchatError:
            loadable = False
        said = {
            "code": code,
            "text": out.getvalue(),
            "memory": memory,
            "outside": sorted(written),
            "loadable": loadable,
        }
        replies.write(json.dumps(said) + "\n")


class Reader:
    """The process that reads; started again when it hangs or dies."""

    def __init__(self, folder: Path) -> None:
        self._command = [sys.executable, __file__, "--serve", str(folder)]
        self._process: subprocess.Popen[str] | None = None

    def read(self, path: Path) -> dict[str, Any] | None:
        """None when there was no answer in time."""
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], SECONDS + 10)
        line = process.stdout.readline() if ready else ""
        if not line:
            self.close()
            return None
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


# --- the worker that loads -------------------------------------------------------------------------------------------


async def load(backend: LocalBackend, path: Path) -> str:
    """What became of a load and an answer: "answered", the code of a failure, or "hang"."""
    options = LoadOptions(n_ctx=256, n_batch=64, n_ubatch=32, calibrate=False)
    last: object = None
    try:
        async with asyncio.timeout(SECONDS + 10):
            async for event in backend.load(path, options, PlacementSpec(threads=1)):
                last = event
            if isinstance(last, ModelLoaded):
                request = Generate(messages=(Message(role="user", content="Hello"),), max_tokens=4)
                async for event in backend.generate(request):
                    last = event
    except TimeoutError:
        return "hang"
    if isinstance(last, Failed):
        assert not _UNTYPED.search(f"{last.message} {last.hint}"), last
        return last.code
    return "answered" if isinstance(last, GenerationFinished) else f"ended with {type(last).__name__}"


def worker_memory(pid: int | None) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+)", status)
    return int(found[1]) * 1024 if found else 0


async def load_all(files: list[Path], state: Path) -> tuple[Counter[str], float, int, int]:
    """Fates, the longest time, the most memory, and how many workers' logs hold a traceback."""
    fates: Counter[str] = Counter()
    longest, memory = 0.0, 0
    logs = state / "logs"
    backend = LocalBackend(state_dir=state / "kv", log_dir=logs)
    try:
        for file in files:
            began = time.monotonic()
            fates[await load(backend, file)] += 1
            longest = max(longest, time.monotonic() - began)
            memory = max(memory, worker_memory(backend.pid))
    finally:
        await backend.close()
    tracebacks = sum(
        "Traceback (most recent" in log.read_text(errors="replace") for log in logs.rglob("*") if log.is_file()
    )
    return fates, longest, memory, tracebacks


def report(bars: list[tuple[str, str, str, bool]], wrong: list[str]) -> None:
    """Print each bar, whether it holds, and what went wrong. Exits with 1 when one does not hold."""
    rows = [(what, got, bar, "yes" if held else "NO") for what, got, bar, held in bars]
    print(table(rows, ("what", "found", "bar", "held")))
    for line in wrong:
        print(line)
    if not all(held for *_, held in bars):
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--files", type=int, default=N_FILES)
    parser.add_argument("--loads", type=int, default=N_LOADS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    n_files, n_loads = (options.files // 10, options.loads // 10) if options.quick else (options.files, options.loads)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("CONFIG", "DATA", "CACHE", "STATE"):
            os.environ[f"XDG_{kind}_HOME"] = str(folder / kind.lower())
        sound = [(content, fields(content)) for content in sound_files(folder)]
        reader = Reader(folder)
        codes: Counter[int] = Counter()
        bad: list[str] = []
        passed: list[Path] = []
        longest, memory = 0.0, 0
        outside: set[str] = set()
        for number in range(n_files):
            if number % 200 == 0:
                say(f"file {number} of {n_files}")
            path = folder / f"hostile-{number:04}.gguf"
            path.write_bytes(mutated(*rng.choice(sound), rng))
            began = time.monotonic()
            said = reader.read(path)
            longest = max(longest, time.monotonic() - began)
            if said is None:
                bad.append(f"{number}: no answer")
                continue
            codes[said["code"]] += 1
            memory = max(memory, said["memory"])
            outside |= set(said["outside"])
            if said["code"] not in (0, 4) or _UNTYPED.search(said["text"]) or _CONTROL.search(said["text"]):
                bad.append(f"{number}: exit {said['code']}, {said['text'][-300:]!r}")
            if said["loadable"]:
                passed.append(path)
            else:
                path.unlink()
        reader.close()
        say(f"{len(passed)} are read; loading up to {n_loads}")
        chosen = rng.sample(passed, min(n_loads, len(passed)))
        fates, load_longest, load_memory, tracebacks = asyncio.run(load_all(chosen, folder / "state-of-worker"))
    bars = [
        ("files shown", f"{n_files}: {dict(sorted(codes.items()))} by exit status", "only 0 and 4", not bad),
        ("longest", f"{longest:.2f} s", f"<= {SECONDS:g} s", longest <= SECONDS),
        ("memory of the reader", f"{memory / 1e6:.0f} MB", "<= 1000 MB", memory <= MEMORY),
        ("files written outside", str(len(outside)), "0", not outside),
        ("files loaded", f"{len(chosen)}: {dict(sorted(fates.items()))}", "no hang", not fates["hang"]),
        ("longest load and answer", f"{load_longest:.2f} s", f"<= {SECONDS:g} s", load_longest <= SECONDS),
        ("memory of the worker", f"{load_memory / 1e6:.0f} MB", "<= 1000 MB", load_memory <= MEMORY),
        ("logs with a traceback", str(tracebacks), "0", not tracebacks),
    ]  # fmt: skip
    report(bars, [*bad[:20], *sorted(outside)[:20]])


if __name__ == "__main__":
    run_main(main)
