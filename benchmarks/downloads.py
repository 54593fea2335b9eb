"""Downloads over the loopback: our process against hf_hub_download, and what kills and cut connections cost.

    python benchmarks/downloads.py [--quick] [--rounds N]

Both sides are fresh processes of the same Python that fetch one file from a local server into an empty cache, over
HTTP; start of the process included. Ours lowers its priority, computes the SHA-256 on the way and syncs the file to the
disk; hf_hub_download does none of that. CPU time is that of the process, from the system.

For the kills, the process is ended by SIGKILL at random moments of a download of 1 GiB, with the connection at full
speed, and started anew. Fetched twice is what the server sent beyond the size of the file. What the process has read is
in the file, so this is what was on its way: in the buffers at both ends of the connection, as much for a small file as
for a large one, and more when the machine is too busy to read it at once. On a long line there is also what the line
itself holds, bandwidth × delay: 12.5 MB at 1 Gbit/s and 100 ms. Smaller buffers would lose less and limit the speed
just there (128 KiB at 100 ms: 1.3 MB/s), so they are as the system chooses them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say

from cpuchat.models.downloads.hf_cache import CachedFile, size_of
from cpuchat.models.downloads.state import Download, Order, RetryPolicy
from cpuchat.models.hub.repository import HubFile, RepoModel
from tests.support.hub_server import Fault, HubServer

MIB = 1 << 20
KILLED_SIZE = 1024 * MIB
CHILD = [sys.executable, "-m", "cpuchat.models.downloads.child"]
THEIRS = """
import sys
from huggingface_hub import hf_hub_download
hf_hub_download(*sys.argv[1:3], cache_dir=sys.argv[3])
"""
KILLS, CUTS = 4, 20
LIMIT_TWICE, LIMIT_RATIO, LIMIT_CUT_MS = 1.0, 0.8, 100


class Site:
    """The file `source` in a repository of its own on a local hub, to be fetched into folders beside it."""

    def __init__(self, hub: HubServer, source: Path) -> None:
        self.hub, self.base = hub, source.parent
        self.repo = f"bench/{source.stem}"
        self.name, self.size = source.name, source.stat().st_size
        self.commit = hub.add(self.repo, {self.name: source})
        self.file = HubFile(path=self.name, size=self.size, sha256=hub.etag(self.repo, self.name))

    @property
    def sent(self) -> int:
        """Bytes of the file that the server has sent so far."""
        return self.hub.bytes_sent(self.name)

    @contextmanager
    def cache(self) -> Iterator[Path]:
        """An empty one."""
        with tempfile.TemporaryDirectory(dir=self.base) as folder:
            yield Path(folder)

    def start(self, cache: Path) -> subprocess.Popen[bytes]:
        """Our process, told what to fetch."""
        process = subprocess.Popen(CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        policy = RetryPolicy(first_wait=0.0, attempts=100)
        model = RepoModel(name=self.file.path, files=(self.file,))
        order = Order(repo=self.repo, revision=self.commit, model=model, cache=str(cache), retry_policy=policy)
        process.stdin.write(msgspec.json.encode(Download(order=order)) + b"\n")
        process.stdin.flush()
        return process

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        last = msgspec.json.decode(process.stdout.readlines()[-1], type=Download)
        if last.state != "done":
            raise MeasureError(f"the download ended as {last.state}: {last.message}")

    def ours(self) -> dict[str, float]:
        with self.cache() as cache:
            began = time.perf_counter()
            process = self.start(cache)
            self.finish(process)
            return self._figures(process, began)

    def theirs(self) -> dict[str, float]:
        with self.cache() as cache:
            began = time.perf_counter()
            command = [sys.executable, "-c", THEIRS, self.repo, self.name, str(cache)]
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            return self._figures(process, began)

    def _figures(self, process: subprocess.Popen[bytes], began: float) -> dict[str, float]:
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        if status:
            raise MeasureError(f"{process.args} ended with status {status}")
        return {"MB/s": self.size / seconds / 1e6, "CPU": (usage.ru_utime + usage.ru_stime) / self.size * 1e9}

    def killed(self, rng: random.Random) -> float:
        """Bytes that were fetched twice because of `KILLS` kills."""
        before = self.sent
        marks = sorted(rng.randrange(self.size) for _ in range(KILLS))
        with self.cache() as cache:
            part = CachedFile(cache, self.repo, self.file).part
            for mark in marks:
                process = self.start(cache)
                while size_of(part) < mark:
                    if process.poll() is not None:
                        raise MeasureError("the download ended before it could be killed")
                    time.sleep(0.001)
                process.kill()
                process.wait()
            self.finish(self.start(cache))
        return self.sent - before - self.size

    def cut(self, rng: random.Random, cuts: int) -> dict[str, float]:
        """Seconds, and percent fetched twice, with `cuts` connections cut at random bytes."""
        before = self.sent
        pieces = [rng.randrange(1, 2 * self.size // (cuts + 1)) for _ in range(cuts)]
        self.hub.fault(self.repo, self.name, *(Fault(cut_after=piece) for piece in pieces))
        with self.cache() as cache:
            began = time.perf_counter()
            self.finish(self.start(cache))
            seconds = time.perf_counter() - began
        self.hub.forget_faults()
        return {"s": seconds, "twice": 100 * (self.sent - before - self.size) / self.size}


def filled(path: Path, size: int) -> Path:
    """A file that takes its room on the disk."""
    block = random.Random(1).randbytes(MIB)
    with path.open("wb") as stream:
        for _ in range(size // MIB):
            stream.write(block)
    return path


def hollow(path: Path, size: int) -> Path:
    """A file of holes, which takes none."""
    with path.open("wb") as stream:
        stream.truncate(size)
    return path


def measured(site: Site, killed: Site, rounds: int) -> list[Row]:
    sides = alternate(rounds, {"cpuchat": site.ours, "hf_hub_download": site.theirs})
    ours, theirs = sides["cpuchat"], sides["hf_hub_download"]
    rng = random.Random(2)
    twice = [killed.killed(rng) for _ in range(rounds)]
    say(f"  killed: {twice}")
    faults = alternate(rounds, {"cut": lambda: site.cut(rng, CUTS), "whole": lambda: site.cut(rng, 0)})
    cut, whole = faults["cut"], faults["whole"]
    per_cut = [1e3 * (a["s"] - b["s"]) / CUTS for a, b in zip(cut, whole, strict=True)]

    def column(rows: Sequence[dict[str, float]], name: str) -> list[float]:
        return [row[name] for row in rows]

    at_most = Target(LIMIT_TWICE, at_least=False)
    quick = Target(LIMIT_CUT_MS, at_least=False)
    return [
        Row("throughput", "MB/s", column(ours, "MB/s"), column(theirs, "MB/s"), Target(LIMIT_RATIO)),
        Row("CPU time per GB", "s", column(ours, "CPU"), column(theirs, "CPU"), note="ours with SHA-256 and fsync"),
        Row(f"1 GiB, {KILLS} kills: fetched twice", "%", [100 * n / killed.size for n in twice], target=at_most),
        Row("fetched twice for each kill", "kB", [n / KILLS / 1e3 for n in twice], note="in files of any size"),
        Row(f"fetched twice with {CUTS} cut connections", "%", column(cut, "twice"), target=at_most),
        Row("time per cut connection", "ms", per_cut, target=quick, note="without back-off"),
    ]


def main() -> None:
    options = arguments(__doc__)
    rounds = options.rounds or (1 if options.quick else 5)
    where = machine()
    with tempfile.TemporaryDirectory() as base, HubServer() as hub:
        os.environ.update(
            HF_ENDPOINT=hub.endpoint,
            HF_HOME=str(Path(base) / "home"),
            NO_PROXY="127.0.0.1,localhost",
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
        )
        site = Site(hub, filled(Path(base) / "model-Q4_K_M.gguf", (64 if options.quick else 1024) * MIB))
        killed = Site(hub, hollow(Path(base) / "model-Q8_0.gguf", KILLED_SIZE))
        rows = measured(site, killed, rounds)
    size = f"{site.size // MIB} MiB over the loopback, the server in the same machine's other cores"
    report("downloads", where, rows, quick=options.quick, remarks=[size])


if __name__ == "__main__":
    run_main(main)
