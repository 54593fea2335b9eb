"""What `cpuchat serve` shows while it runs: one block of figures on a terminal, drawn anew twice a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from cpuchat.cli.terminal import TerminalOutput
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.serving.service import InferenceService

_SECONDS = 0.5
_ENDED = {"ok": "answered", "queue_full": "refused: queue full"}


@contextlib.asynccontextmanager
async def shown(service: InferenceService, terminal: TerminalOutput) -> AsyncIterator[None]:
    """Show the figures inside the block, where the terminal can; lines about requests scroll above them."""
    if not terminal.moves:
        yield
        return
    showing = asyncio.create_task(_show(service, terminal))
    try:
        yield
    finally:
        showing.cancel()
        await asyncio.wait({showing})
        terminal.clear_progress()


async def _show(service: InferenceService, terminal: TerminalOutput) -> None:
    while True:
        terminal.status(figures(service))
        await asyncio.sleep(_SECONDS)


def figures(service: InferenceService) -> str:
    """Return the figures as lines: requests, the running answer, and what was reused since the start."""
    cached, evaluated = service.metrics.prompt_tokens
    requests = [f"{int(service.running is not None)} running", f"{service.waiting} queued"]
    requests += [f"{n:,} {_ENDED.get(result, result)}" for result, n in service.metrics.results.items()]
    lines = [" · ".join(requests), _running(service)]
    if cached + evaluated:
        share = f"{100 * cached / (cached + evaluated):.0f} %"
        lines.append(f"reused {cached:,} of {units.plural(cached + evaluated, 'prompt token')} ({share})")
    return "\n".join(filter(None, lines))


def _running(service: InferenceService) -> str:
    from cpuchat.present.answers import prefill_progress

    running, now = service.running, service.figures
    if running is None:
        return ""
    if running.prompt is None:
        return "starting"
    if running.first_at is None:
        rate, unread = now.prefill_tok_s.value, running.prompt.total - running.prompt.processed
        return prefill_progress(running.prompt, unread / rate if rate else None)
    drafting = now.drafting
    parts = [units.plural(running.timings.predicted_n, "token")]
    if now.tok_s.value is not None:
        parts.append(f"{units.rate(now.tok_s.value)} tok/s")
    if drafting.acceptance.value is not None:
        parts.append(f"{100 * drafting.acceptance.value:.0f} % of drafts accepted")
    if drafting.tokens_per_pass.value is not None:
        parts.append(f"{drafting.tokens_per_pass.value:.1f} tokens per pass")
    return " · ".join(parts)
