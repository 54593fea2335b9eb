"""How long a stop takes: from asking the worker to stop until it says that it has.

    python benchmarks/cancel.py [--quick] [--rounds N]

In prefill the stop comes at many places of a prompt of 2,000 tokens, in decode after a few tokens.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import models
from common import Row, Target, arguments, machine, report, run_main
from product import GREEDY, worker

from cpuchat.backend.local import LocalBackend
from cpuchat.protocol.messages import Generate, LoadOptions, PrefillProgress, TextDelta

PROMPT = 2000
LIMIT = Target(100, False)


async def _stop(backend: LocalBackend, request: Generate, after: type, wait: float) -> float:
    """Milliseconds from the cancel, `wait` seconds after the first event of kind `after`, to the final event."""
    asked: list[float] = []

    async def cancel_later() -> None:
        await asyncio.sleep(wait)
        asked.append(time.perf_counter())
        await backend.cancel()

    task: asyncio.Task[None] | None = None
    async for event in backend.generate(request):
        if task is None and isinstance(event, after):
            task = asyncio.create_task(cancel_later())
    ended = time.perf_counter()
    if task is not None:
        await task
    return 1e3 * (ended - asked[0])


async def _measure(file: Path, stops: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"prefill": [], "decode": []}
    async with worker(file, LoadOptions(n_ctx=4096)) as backend:
        for n in range(stops):
            prompt = models.words(PROMPT, salt=n)
            request = Generate(prompt=prompt, sampling=GREEDY, max_tokens=1)
            found["prefill"].append(await _stop(backend, request, PrefillProgress, 0.2 + 0.37 * n))
            request = Generate(prompt=models.words(16, salt=n), sampling=GREEDY, max_tokens=400)
            found["decode"].append(await _stop(backend, request, TextDelta, 0.1 + 0.013 * n))
    return found


def main() -> None:
    options = arguments(__doc__)
    where = machine()
    stops = 3 if options.quick else 12
    rows = []
    for shape, quantization in (("0.5b", "Q4_K_M"), ("1.5b", "Q4_K_M"), ("1.5b", "Q8_0")):
        found = asyncio.run(_measure(models.model(shape, quantization), stops))
        rows += [
            Row(f"{shape.upper()} {quantization}, stopped in {part}", "ms", times, target=LIMIT)
            for part, times in found.items()
        ]
    report("cancel", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
