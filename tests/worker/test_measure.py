"""Tests timing random tokens with the real worker, and answers that the model cannot end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.base.paths import demo_dir
from cpuchat.protocol.messages import Failed, Measure, Measured, Speculation
from tests.support.chatting import chat, collect, load, worker

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO = demo_dir() / "cpuchat-demo-8m-q8_0.gguf"
DEMO_DRAFT = demo_dir() / "cpuchat-demo-draft-1m-q8_0.gguf"


async def test_tokens_that_do_not_fit_and_a_missing_model_are_told(tiny_model: Path) -> None:
    async with worker() as backend:
        found = await backend.measure(Measure(n_gen=4))
        assert isinstance(found, Failed) and found.code == "model_not_found"
        await load(backend, tiny_model, n_ctx=512)
        found = await backend.measure(Measure(n_prompt=256, n_gen=64, depth=256))
        assert isinstance(found, Failed) and found.code == "usage" and "576" in found.message
        assert isinstance(await backend.measure(Measure(n_prompt=256, depth=256)), Measured)


async def test_a_run_can_be_cancelled(tiny_model: Path, other: LocalBackend) -> None:
    await load(other, tiny_model)
    running = asyncio.ensure_future(other.measure(Measure(n_gen=1_000_000)))
    assert isinstance(await running, Failed)  # too long for the context
    running = asyncio.ensure_future(other.measure(Measure(n_gen=4000)))
    while not running.done():
        await other.cancel()
        await asyncio.sleep(0)
    found = await running
    assert isinstance(found, Failed) and found.code == "interrupted"
    assert isinstance(await other.measure(Measure(n_gen=4)), Measured)


async def test_a_model_that_may_not_end_writes_all_tokens_with_and_without_drafts(other: LocalBackend) -> None:
    await load(other, DEMO, n_ctx=1024, draft_path=str(DEMO_DRAFT))
    request = chat("Hello", max_tokens=400)
    assert (await collect(other.generate(request))).finished.stop_reason == "end"

    async def forced(speculation: Speculation) -> int:
        request = chat("Hello", max_tokens=400, ignore_eos=True, speculation=speculation)
        return (await collect(other.generate(request))).timings.predicted_n

    # Not their texts: past its end the toy has near-ties, which other passes decide otherwise on some CPUs.
    assert await forced(Speculation()) == 400
    assert await forced(Speculation(drafters=("draft",), depth=4)) == 400
