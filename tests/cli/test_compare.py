"""Tests `cpuchat compare` with real workers and the demo pair."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cli.program import HANG_GUARD, start, succeeded

pytestmark = [pytest.mark.usefixtures("measured_machine", "one_core"), pytest.mark.slow]

PROMPT = "How do I stop an answer?"


def test_both_answers_the_table_and_the_reason() -> None:
    done = succeeded("compare", "demo", "demo-q4", PROMPT)
    lines = done.stdout.splitlines()
    assert lines.index("── A Q8_0 ──") < lines.index("── B Q4_K_M ──")
    assert any(line.split() == ["Q8_0", "Q4_K_M", "B", "÷", "A"] for line in lines)
    for label in ("decode", "first token", "prefill", "memory", "bytes per token"):
        assert any(line.startswith(label) for line in lines), label


def test_json_of_three_rounds_has_medians() -> None:
    done = succeeded("compare", "demo", "demo,threads=1", "--rounds", "3", "--max-tokens", "8", "--json", stdin=PROMPT)
    found = json.loads(done.stdout)
    assert [side["name"] for side in found["sides"]] == ["Q8_0", "Q8_0 · threads 1"]
    assert found["sides"][1]["settings"] == {"threads": "1"}
    (turn,) = found["turns"]
    assert turn["prompt"] == PROMPT
    assert [one["first"] for one in turn["rounds"]] == ["A", "B", "A"]
    speed = turn["figures"]["tok_s"]
    counted = [one for one in turn["rounds"] if not one["disturbed"]] or turn["rounds"]
    counted = counted if len(counted) == 3 and not counted[0]["disturbed"] else counted[-1:]
    rates = sorted(one["answers"][0]["timings"]["predicted_per_second"] for one in counted)
    assert speed["a"] == {"median": rates[len(rates) // 2], "low": rates[0], "high": rates[-1], "n": len(rates)}
    assert speed["ratio"] == pytest.approx(speed["b"]["median"] / speed["a"]["median"])
    assert all(one["memory"] > 1_000_000 for one in turn["rounds"][0]["answers"])
    assert turn["choice"] is None  # one file


def test_ctrl_c_stops_and_shows_what_there_is(tmp_path: Path) -> None:
    process = start("compare", "demo", "demo-q4", "--rounds", "100", PROMPT)
    try:
        while b"B Q4_K_M" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=HANG_GUARD)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "decode" in output.decode()
