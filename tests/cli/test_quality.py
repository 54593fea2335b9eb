"""Tests `cpuchat quality`: what it prints of the demo model's two files, and how it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pexpect
import pytest
from click.testing import CliRunner, Result

from cpuchat.base.errors import UsageError, VocabularyMismatch
from cpuchat.base.paths import demo_dir
from cpuchat.cli.compare import quality
from cpuchat.quality.measure import QualityMeasurement
from cpuchat.quality.texts import prose
from tests.cli.program import COMMAND, HANG_GUARD

pytestmark = pytest.mark.usefixtures("measured_machine", "one_core")


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(quality, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(prose()[:12000], encoding="utf-8")
    return str(file)


def test_what_is_measured_is_kept_and_shown_as_a_table(text: str) -> None:
    arguments = ("demo", "demo-q4", "--text", text)
    found = json.loads(run(*arguments, "--json").stdout)
    assert found["complete"] and found["windows"] > 3
    (other,) = found["others"]
    assert other["quantization"] == "Q4_K_M" and 0 < other["kld"]["value"] < 1
    assert other["same_top"]["low"] < other["same_top"]["value"] < other["same_top"]["high"]
    assert json.loads(run(*arguments, "--json").stdout) == found

    printed = run(*arguments).stdout
    lines = printed.splitlines()
    assert lines[0].startswith("Q4_K_M: ") and "would differ" in lines[0]
    assert "same next token" in lines[2] and "KLD mean" in lines[2]
    assert lines[3].startswith("Q4_K_M") and "%" in lines[3] and "±" in lines[3]
    assert "positions scored; base Q8_0" in printed
    assert "▸" in printed


def test_bad_input_is_refused_with_what_to_do(tmp_path: Path, tiny_model: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(UsageError, match="less than one window of"):
        run("demo", "demo-q4", "--text", str(short))
    with pytest.raises(VocabularyMismatch, match=r"token by token: .* `cpuchat compare` works"):
        run("demo", str(tiny_model))


def test_ctrl_c_prints_the_estimate_and_the_next_run_resumes() -> None:
    command = [*COMMAND[1:], "quality", "demo", "demo-q4"]
    child = pexpect.spawn(COMMAND[0], command, env={**os.environ, "TERM": "xterm"}, timeout=HANG_GUARD)
    child.expect(r"[2-9] of \d+ windows")
    child.sendintr()
    child.expect("positions scored")
    child.expect("the same command resumes")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    q8, q4 = (demo_dir() / f"cpuchat-demo-8m-{kind}.gguf" for kind in ("q8_0", "q4_k_m"))
    assert len(QualityMeasurement(q8, [q4]).comparisons[0].windows) >= 2
