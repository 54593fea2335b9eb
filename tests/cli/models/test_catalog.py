"""Tests `cpuchat models catalog`: the list, one model, what is here, and the user's own entries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpuchat.hardware.memory import total_bytes
from cpuchat.models.catalog import load_catalog
from cpuchat.telemetry.units import size
from tests.cli.program import run, succeeded
from tests.models.drafts.files import header_file, write_catalog


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_all_are_listed_with_what_fits() -> None:
    done = succeeded("models", "catalog")
    rows = {line.split()[0]: line for line in done.stdout.split("\n\n")[0].splitlines()[1:]}
    assert set(rows) == {model.id for model in load_catalog().models}
    assert rows["qwen2.5-0.5b-instruct"].split()[-2] == "fits" and rows["qwen2.5-0.5b-instruct"].split()[-1][0] == "≈"
    assert rows["kimi-k2.5"].endswith("too large") or total_bytes() > 600e9
    some = run("models", "catalog", "qwen3", "8b").stdout
    assert "\nqwen3-8b " in some and "llama" not in some


def test_what_is_not_verified_says_so() -> None:
    user = write_catalog(("big", "Big", 4096e-9, []), ("sure", "Sure", 4096e-9, []))
    user.write_text(user.read_text() + 'verified = ["repo", "Q8_0"]\nyear = 2100\n')  # the newest is put first
    rows = {line.split()[0]: line.split() for line in run("models", "catalog", "owner/").stdout.splitlines()[1:3]}
    assert rows["big"][:5] == ["big", "?", "4.1k", "≈1.0", "MB"]
    assert rows["sure"][:5] == ["sure", "★", "4.1k", "1.0", "MB"]


def test_what_is_here_is_marked(hub: Path) -> None:
    write_catalog(("big", "Big", 4096e-9, ["small"]), ("small", "Small", 8e-9, []))
    revision = hub / "models--owner--Big-GGUF" / "snapshots" / "abc"
    revision.mkdir(parents=True)
    file = header_file(revision / "any.gguf", weights=4096, facts={"general.file_type": 7})
    rows = {row["id"]: row for row in json.loads(run("models", "catalog", "--json").stdout)}
    assert (rows["big"]["here"], rows["small"]["here"]) == (True, False)
    assert (rows["big"]["fit"], rows["big"]["drafts"]) == ("fits", ["small"])
    listed = {line.split()[0]: line for line in run("models", "catalog", "owner/").stdout.splitlines() if line}
    assert listed["big"].startswith("big ○ ?  ") and listed["big"].split()[4:6] == size(file.stat().st_size).split()


def test_a_wrong_entry_is_told_and_the_others_are_listed() -> None:
    file = write_catalog(("big", "Big", 4096e-9, []), ("bad", "Bad", -1.0, []))
    done = succeeded("models", "catalog")
    listed = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert "big" in listed
    assert "bad" not in listed
    assert str(file) in done.stderr
    assert "model 2 (bad), params" in done.stderr
