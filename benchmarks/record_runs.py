"""Record the events of real answers of all kinds, for the tests that replay them (tests/telemetry/recorded).

    python benchmarks/record_runs.py [NAME ...]

Each file holds how the answer was to be drafted and (seconds, event) in the order in which they came; of texts only
the counts are kept. Nothing is judged here, so the machine need not be quiet: figures must not contradict each other
beside other load either.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import read_topology
from cpuchat.measure import peak, store
from cpuchat.measure.subject import on_cores
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.models.synthetic.model import write_model
from cpuchat.protocol.messages import (
    AnyEvent,
    Generate,
    LoadOptions,
    LoadProgress,
    Message,
    PrefillProgress,
    Sampling,
    Speculation,
    TextDelta,
)
from tests.support.pair_files import write_pair
from tests.support.shapes import shape_of

FOLDER = Path(__file__).parent.parent / "tests" / "telemetry" / "recorded"
ALL = ("draft", "suffix")
PLAIN = Speculation()
GREEDY = Sampling(temperature=0.0)


class Recorded(msgspec.Struct):
    """One file."""

    name: str
    speculation: Speculation
    events: list[tuple[float, AnyEvent]]


@dataclass(frozen=True)
class Run:
    """`model`: "demo", "pair ALPHA" (1.5B shape cut to 3 layers) or "repeating" (0.5B shape). `stop_at` an event."""

    model: str
    speculation: Speculation = PLAIN
    max_tokens: int = 96
    n_ctx: int = 2048
    prompt: int = 80
    stop_at: type[AnyEvent] | None = None
    probe: bool = True
    answers: int = 1


RUNS = {
    "toy": Run("demo"),
    "toy-drafted": Run("demo", Speculation(drafters=ALL, depth=4)),
    "plain": Run("repeating"),
    "not-probed": Run("repeating", probe=False, max_tokens=24),
    "suffix": Run("repeating", Speculation(drafters=("suffix",)), answers=2),
    "adaptive": Run("pair 0.9", Speculation(drafters=ALL), answers=2),
    "never-right": Run("pair 0.1", Speculation(drafters=("draft",))),
    "fixed": Run("pair 0.9", Speculation(drafters=("draft",), depth=5)),
    "stopped-in-prefill": Run("repeating", prompt=1000, stop_at=PrefillProgress),
    "stopped-while-writing": Run("pair 0.9", Speculation(drafters=ALL), stop_at=TextDelta),
    "context-full": Run("repeating", Speculation(drafters=("suffix",)), max_tokens=0, n_ctx=256),
}


def files(run: Run, folder: Path) -> tuple[Path, Path | None]:
    """Target and draft."""
    if run.model == "demo":
        target, draft = (paths.demo_dir() / DEMO_FILES[name] for name in ("demo", "demo-draft"))
        return target, draft if run.speculation.drafters else None
    if run.model == "repeating":
        path = folder / "repeating.gguf"
        if not path.exists():
            write_model(path, shape_of("0.5b", 6), "Q8_0")
        return path, None
    alpha = float(run.model.split()[1])
    target, draft = folder / f"target-{alpha}.gguf", folder / f"draft-{alpha}.gguf"
    if not target.exists():
        write_pair(target, draft, alpha, target="1.5b", draft="0.05b", layers=3, draft_layers=2, n_vocab=32_768)
    return target, draft


async def record(name: str, run: Run, folder: Path) -> Recorded:
    target, draft = files(run, folder)
    cpus = choose_cores(read_topology()).cpus
    store.forget(on_cores(cpus), peak.WHAT)
    if run.probe:
        peak.keep(peak.measure(cpus))
    options = LoadOptions(n_ctx=run.n_ctx, draft_path=str(draft or ""), calibrate=bool(run.speculation.drafters))
    backend, recorded = LocalBackend(), Recorded(name, run.speculation, [])
    began = time.monotonic()

    def keep(event: AnyEvent) -> None:
        if isinstance(event, TextDelta):
            event = msgspec.structs.replace(event, text="x")
        if not isinstance(event, LoadProgress):
            recorded.events.append((round(time.monotonic() - began, 4), event))

    try:
        async for event in backend.load(target, options):
            keep(event)
        text = "one two three four five six seven eight nine ten " * (run.prompt // 10)
        for _ in range(run.answers):
            request = Generate(
                messages=(Message(role="user", content=text),) if run.model == "demo" else (),
                prompt=None if run.model == "demo" else text,
                sampling=GREEDY,
                max_tokens=run.max_tokens,
                speculation=run.speculation,
            )
            seen = 0
            async for event in backend.generate(request):
                keep(event)
                seen += run.stop_at is not None and isinstance(event, run.stop_at)
                if seen == (2 if run.stop_at is PrefillProgress else 20):
                    await backend.cancel()
    finally:
        await backend.close()
    return recorded


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", choices=[[], *RUNS])
    chosen = parser.parse_args().name or list(RUNS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "XDG_DATA_HOME": f"{folder}/data"}
        for name in chosen:
            recorded = await record(name, RUNS[name], Path(folder))
            encoded = msgspec.json.encode(recorded)
            for place in (folder, str(paths.demo_dir())):
                encoded = encoded.replace(place.encode(), b"/models")
            (FOLDER / f"{name}.json").write_bytes(encoded)
            print(f"{name}: {len(recorded.events)} events, {len(encoded):,} bytes")


if __name__ == "__main__":
    asyncio.run(main())
