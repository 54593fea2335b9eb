"""Tests a process that quantizes and does not behave: each end is a QuantizeFailed that says what happened."""

from __future__ import annotations

import sys

import pytest

from cpuchat.base.errors import DiskFull, QuantizeFailed
from cpuchat.models.quantize.types import QuantizeProcess, QuantizeRequest

pytestmark = pytest.mark.slow

REQUEST = QuantizeRequest(source="/models/model.gguf", number=15)


async def ask(program: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Return the answer of the Python `program`, run in place of the quantizing process."""
    monkeypatch.setattr("cpuchat.models.quantize.types.python_command", lambda *_: [sys.executable, "-c", program])
    async with QuantizeProcess() as process:
        await process.send(REQUEST)
        return await process.receive()


@pytest.mark.parametrize("line", ["nonsense", '{"type": "result"}'])
async def test_a_reply_that_is_no_message_is_told(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuantizeFailed, match="invalid answer"):
        await ask(f"print({line!r}, flush=True); input()", monkeypatch)


async def test_a_reply_that_is_cut_short_is_told_with_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuantizeFailed, match="status 3"):
        await ask("import sys; sys.stdout.write('{\"type\"'); sys.stdout.flush(); sys.exit(3)", monkeypatch)


async def test_a_refusal_is_the_error_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = '{"type": "refused", "code": "disk_full", "message": "No room.", "hint": "Delete something."}'
    with pytest.raises(DiskFull, match="No room"):
        await ask(f"print({refusal!r}, flush=True)", monkeypatch)
