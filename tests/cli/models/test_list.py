"""Tests `cpuchat models list` over a cache and a folder as a user has them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from cpuchat.models.library.usage import UsageLog
from tests.cli.models.places import folder_setting
from tests.cli.program import HANG_GUARD, run, start
from tests.models.library.files import cached
from tests.models.library.test_usage import answer, info


@pytest.fixture
def tiny(hub: Path, tiny_model: Path) -> Path:
    """The tiny model in the cache, under a hostile file name."""
    return cached(hub, "some/tiny-GGUF", "tiny-\x1b[31m.gguf", tiny_model)


def test_the_list_has_the_cache_and_the_folders(tiny: Path, tiny_model_without_template: Path) -> None:
    folder_setting(tiny_model_without_template.parent)
    done = run("models", "list")
    assert done.returncode == 0, done.stderr
    headings, *lines = done.stdout.splitlines()
    assert headings.split() == ["NAME", "ARCH", "PARAMS", "QUANT", "CONTEXT", "SIZE", "--model"]
    [of_cache] = [line for line in lines if "some/tiny-GGUF:F32" in line]
    assert of_cache.split()[:5] == ["tiny", "llama", "117k", "F32", "4,096"]
    [of_folder] = [line for line in lines if str(tiny_model_without_template) in line]
    assert of_folder.endswith("(no chat template)")
    assert "\x1b" not in done.stdout
    assert "cpuchat probe" in done.stderr  # why no speed is predicted


@pytest.mark.usefixtures("measured_machine", "one_core")
def test_what_the_list_says_is_what_model_takes(tiny: Path) -> None:
    [spec] = [row["spec"] for row in json.loads(run("models", "list", "--json").stdout) if row["source"] != "demo"]
    done = run("ask", "--model", spec, "--max-tokens", "1", "Hello")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("measured_machine", "one_core")
def test_a_model_that_answered_comes_first_with_its_speed(tiny: Path) -> None:
    done = run("ask", "--model", "some/tiny-GGUF", "--max-tokens", "20", "--drafters", "off", "Hello")
    assert done.returncode == 0, done.stderr
    first, *others = json.loads(run("models", "list", "--json").stdout)
    assert first["repo"] == "some/tiny-GGUF"
    assert first["last_used"] == pytest.approx(time.time(), abs=HANG_GUARD)
    assert all(row["last_used"] == 0 for row in others)
    UsageLog().answered(info(Path(first["path"])), answer(41.26))  # that of an answer beside other load is not kept
    headings, line, *_ = run("models", "list").stdout.splitlines()
    assert headings.split()[-3:] == ["TOK/S", "USED", "--model"]
    assert time.strftime("%Y-", time.localtime()) in line


def test_measured_and_expected_speeds_are_told_apart(hub: Path, tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    path = Path(shutil.copy(tiny_model, folder / "t.gguf"))
    UsageLog().answered(info(path), answer(41.26))
    folder_setting(folder)
    [line] = [line for line in run("models", "list").stdout.splitlines() if str(path) in line]
    assert line.split()[-2:] == ["41.3", str(path)]


def test_the_json_list_holds_plain_figures(tiny: Path) -> None:
    rows = json.loads(run("models", "list", "--json").stdout)
    [row] = [row for row in rows if row["source"] == "huggingface"]
    assert (row["repo"], row["name"], row["path"]) == ("some/tiny-GGUF", "tiny", str(tiny))
    assert row["size"] == tiny.stat().st_size
    assert (row["damaged"], row["unfinished"], row["has_template"]) == (None, None, True)


def test_what_is_damaged_or_unfinished_comes_last_and_says_so(hub: Path, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "broken.gguf").write_bytes(b"GGUF")
    folder_setting(folder)
    blob = cached(hub, "some/tiny-GGUF", "tiny.gguf", tiny_model).resolve()
    content = blob.read_bytes()
    half = blob.with_name("1" * 64 + ".incomplete")
    half.write_bytes(content[: len(content) // 2])
    done = run("models", "list")
    assert done.returncode == 0, done.stderr
    unfinished, damaged = done.stdout.splitlines()[-2:]
    assert "broken" in damaged
    assert "  damaged  " in damaged
    assert "  unfinished  " in unfinished
    assert f"{half} (Partial download: 50 % downloaded.)" in unfinished


def test_a_reader_that_goes_away_ends_the_list_quietly(tiny: Path) -> None:
    process = start("models", "list")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(HANG_GUARD) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
