"""The real worker and the real server on 300 generated grammars and JSON schemas: nested repetitions, rules that may be
empty, enums, classes, ambiguous alternatives, and harmless ones.

    .venv/bin/python benchmarks/hostile/grammars.py [--first 0] [--count 300]

Every form has a number and is the same in every run. It is sent to `cpuchat serve demo` as a stream, whose client
leaves at the first text. Measured: from the request to a refusal or the first text, from the hang-up until the engine
is idle, and the peak memory of server and worker. Asserted: at most 2 s, 0.5 s and 1 GB, no traceback, and neither a
server nor a worker that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

MOST_SECONDS, MOST_IDLE, MOST_BYTES = 2.0, 0.5, 1 << 30
PROGRAM = [sys.executable, "-P", "-m", "cpuchat.cli.main"]
CLASSES = ("[a-z]", "[a-z ]", "[^\\n]", ".", "[0-9]", "[a-f0-9]", "[ \\t]")


def nested(rng: random.Random) -> str:
    """Return rules that repeat each other, as a rule from zero times on."""
    depth = rng.randint(1, 4)
    rules = [f"r{i} ::= {_joined(rng, f'r{i + 1}')}{_times(rng)}" for i in range(depth)]
    return "\n".join(["root ::= r0", *rules, f"r{depth} ::= {rng.choice(CLASSES)}{_times(rng)}"])


def _joined(rng: random.Random, rule: str) -> str:
    return f"({rule} {rng.choice(CLASSES)}?)" if rng.random() < 0.3 else rule


def _times(rng: random.Random) -> str:
    low = rng.choice((0, 0, 0, 1, 5))
    return rng.choice(("*", "+", "?", "", f"{{{low},{rng.choice((10, 100, 2000))}}}", f"{{{low},}}"))


def nullable(rng: random.Random) -> str:
    """Return a chain or a row of rules that may be empty."""
    n = rng.choice((3, 8, 24, 200))
    if rng.random() < 0.5:
        rules = [f"r{i} ::= (r{i + 1} r{i + 1})?" for i in range(n)]
        return "\n".join(["root ::= r0", *rules, f'r{n} ::= "x"?'])
    return "root ::= " + " ".join(["x"] * n) + f"\nx ::= {rng.choice(CLASSES)}{rng.choice(('*', '?', '{0,50}'))}"


def ambiguous(rng: random.Random) -> str:
    ways = [rng.choice(CLASSES) for _ in range(rng.randint(2, 4))]
    if rng.random() < 0.5:
        return f"root ::= ({' | '.join(ways)}){rng.choice(('*', '+', '{0,500}'))}"
    return "root ::= " + " | ".join(f'{one} root "{i}"' for i, one in enumerate(ways)) + ' | "."'


def flat(rng: random.Random) -> str:
    return "root ::= " + " | ".join(f'"{rng.randrange(10**6)} a value"' for _ in range(rng.choice((10, 500, 5000))))


def enum(rng: random.Random) -> Any:
    values = [f"{rng.choice('abc')} value {rng.randrange(10**6)}" for _ in range(rng.choice((5, 500, 5000, 20_000)))]
    more = {"allOf": [{"enum": values[len(values) // 2 :]}]} if rng.random() < 0.5 else {}
    return {"properties": {"name": {"enum": values, **more}}, "required": ["name"]}


def pattern(rng: random.Random) -> Any:
    if rng.random() < 0.25:
        n = rng.choice((100, 4000, 40_000))
        return {"type": "string", "pattern": f"^[^{''.join(map(chr, range(0x3400, 0x3400 + n)))[::2]}]+$"}
    inner = rng.choice((r"\w", "[a-z]", ".", r"\d+", "(a|[a-z])"))
    for _ in range(rng.randint(1, 4)):
        inner = f"({inner}{rng.choice(('*', '+', '{0,40}', '{0,2000}', '?'))}{rng.choice(('', '-?', ' '))})"
    return {"type": "string", "pattern": f"^{inner}$"}


def fields(rng: random.Random) -> Any:
    kinds = ({"type": "string"}, {"type": "integer", "maximum": 900}, {"type": "array", "maxItems": 2000}, {})
    properties = {f"field_{i}": rng.choice(kinds) for i in range(rng.choice((3, 50, 1000)))}
    needed = [name for name in properties if rng.random() < rng.choice((0.0, 0.5))]
    return {"type": "object", "properties": properties, "required": needed}


MAKERS = (nested, nullable, ambiguous, flat, enum, pattern, fields)


def form(number: int) -> tuple[str, dict[str, Any]]:
    """Return the kind of form of this number, and the field of a request that has it."""
    rng, make = random.Random(number), MAKERS[number % len(MAKERS)]
    made = make(rng)
    return make.__name__, {"grammar": made} if isinstance(made, str) else {"json_schema": made}


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the address of a server, and its process. `folder` holds all that it writes."""
    own = {f"CPUCHAT_{kind}_DIR": str(folder / kind) for kind in ("CONFIG", "DATA", "CACHE")}
    with (folder / "stderr.txt").open("wb") as errors:
        command = [*PROGRAM, "serve", "demo", "--port", "0", "--max-tokens", "64"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **own})
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().split()[-1], process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def answer(http: httpx.Client, request: dict[str, Any]) -> tuple[str, float, float]:
    """Return how a request ended, the seconds until then, and those until the engine was idle."""
    start = time.perf_counter()
    how = "no text"
    try:
        with http.stream("POST", "/v1/chat/completions", json=request) as response:
            if response.status_code != 200:
                how = json.loads(response.read())["error"]["code"]
            for line in response.iter_lines() if response.status_code == 200 else ():
                if '"content":"' in line.replace('"content":""', ""):
                    how = "text"
                elif line.startswith('data: {"error"'):
                    how = json.loads(line[6:])["error"]["code"]
                if how != "no text":
                    break
    except httpx.TimeoutException:
        how = "too slow"
    took, left = time.perf_counter() - start, time.perf_counter()
    while http.get("/slots").json()[0]["is_processing"]:
        time.sleep(0.005)
    return how, took, time.perf_counter() - left


def peak_bytes(process: psutil.Process) -> int:
    """Return the most resident memory that a process has had so far (VmHWM, proc(5)), with what it shares."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    chosen = parser.parse_args()
    faults: list[str] = []
    kinds: dict[str, list[tuple[str, float, float]]] = {make.__name__: [] for make in MAKERS}
    peak = 0
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as (url, process):
        http = httpx.Client(base_url=url.removesuffix("/v1"), timeout=20, trust_env=False)
        worker = psutil.Process(process.pid).children()[0].pid
        for number in range(chosen.first, chosen.first + chosen.count):
            kind, field = form(number)
            messages = [{"role": "user", "content": "Name a model."}]
            result = answer(http, {"messages": messages, "stream": True, "temperature": 0, **field})
            kinds[kind].append(result)
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
            used = max(map(peak_bytes, family))
            peak = max(peak, used)
            reasons = [
                f"{result[1]:.2f} s to {result[0]}" * (result[1] > MOST_SECONDS),
                f"{result[2]:.2f} s until idle" * (result[2] > MOST_IDLE),
                f"{used / 1e9:.2f} GB" * (used > MOST_BYTES),
                "the worker ended" * (all(one.pid != worker for one in family)),
                result[0] * (result[0] in ("internal_error", "error", "worker_died", "worker_stuck")),
            ]
            worker = family[-1].pid
            faults += [f"{kind} {number}: {', '.join(filter(None, reasons))}"] if any(reasons) else []
        text = (Path(name) / "stderr.txt").read_text()
        faults += ["traceback in the log"] if "Traceback" in text else []
    print("| forms | answered or refused | to that, median / max | idle, median / max |\n|---|---|---|---|")
    for kind, results in kinds.items():
        if results:
            counts = ", ".join(f"{n} {how}" for how, n in Counter(how for how, _, _ in results).most_common())
            took, idle = [one[1] for one in results], [one[2] for one in results]
            figures = " | ".join(f"{statistics.median(x):.2f} / {max(x):.2f} s" for x in (took, idle))
            print(f"| {len(results)} {kind} | {counts} | {figures} |")
    print(f"\nPeak memory of one process: {peak / 1e6:.0f} MB. Faults: {len(faults)}.", *faults, sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
