"""Tests `cpuchat compare` with real workers and the demo pair."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from cpuchat.compare.runner import Round
from tests.cli.program import HANG_GUARD, run, start

pytestmark = [pytest.mark.usefixtures("measured_machine", "one_core"), pytest.mark.slow]

PROMPT = "How do I stop an answer?"


def test_both_answers_the_table_and_the_reason() -> None:
    done = run("compare", "demo", "demo-q4", PROMPT)
    assert done.returncode in (0, 27)  # whatever else runs
    lines = done.stdout.splitlines()
    assert lines.index("── A Q8_0 ──") < lines.index("── B Q4_K_M ──")
    assert any(line.split() == ["Q8_0", "Q4_K_M", "B", "÷", "A"] for line in lines)
    for label in ("decode", "first token", "prefill", "resident memory", "mean bytes per token"):
        assert any(line.startswith(label) for line in lines), label


def test_json_of_three_rounds_has_medians() -> None:
    done = run("compare", "demo", "demo,threads=1", "--rounds", "3", "--max-tokens", "8", "--json", stdin=PROMPT)
    found = json.loads(done.stdout)
    assert done.returncode in (0, 27)  # the second beside other programs
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
    assert found["verdict"]["take"] is None  # one file


def test_beside_other_programs_the_exit_code_and_the_first_word_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Round, "disturbed", True)
    done = run("compare", "demo", "demo-q4", "--max-tokens", "4", "--json", "--no-agreement", PROMPT)
    assert done.returncode == 27
    assert done.stdout.startswith('{"verdict": {"caveat": "Too noisy for a verdict: other programs')
    assert json.loads(done.stdout)["verdict"]["ratio"] is None


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
