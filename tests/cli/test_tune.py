"""Tests `cpuchat tune` with a real worker and made-up speeds."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from cpuchat.config import settings
from cpuchat.models.machine import find_tuned
from tests.cli.program import run, start, succeeded
from tests.support.tuning import make_up_speeds, without_flash_attention

pytestmark = pytest.mark.usefixtures("measured_machine", "one_core")


def test_a_table_one_sentence_the_way_back_and_json(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_speeds(monkeypatch, without_flash_attention)
    done = succeeded("tune", str(tiny_model))
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["CHOICE", "BEFORE", "→", "AFTER", "DECODE", "PREFILL", "RESULT"]
    [row] = [line for line in lines if line.endswith("adopted")]
    assert row.split() == ["flash", "attention", "auto", "→", "off", "0.0", "%", "+25.0", "%", "adopted"]
    assert "prefill 100 → 125 tok/s" in done.stdout
    assert "flash attention · auto → off" in done.stderr
    assert find_tuned(tiny_model) is not None

    done = run("tune", str(tiny_model), "--undo")
    assert (done.returncode, done.stdout) == (0, f"{tiny_model.stem}: untuned from the next load.\n")
    assert find_tuned(tiny_model) is None
    assert "was not tuned" in run("tune", str(tiny_model), "--undo").stdout
    found = json.loads(run("tune", str(tiny_model), "--json").stdout)
    assert found["changes"] == {"engine": {"flash_attn": "off"}} and found["prefill"] == pytest.approx([100, 125])


def test_ctrl_c_stops_it(tiny_model: Path) -> None:
    settings.update({"engine": {"memory_policy": "local"}})  # the first choice is made at once
    process = start("tune", str(tiny_model))
    assert b"set by you: memory_policy = local" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 130 and b"Stopped" in out, out
