"""Tests `cpuchat models list` over a cache and a folder as a user has them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pexpect
import pytest

from cpuchat.config import settings
from cpuchat.models.library import usage
from tests.cli.program import COMMAND, HANG_GUARD, run, succeeded
from tests.models.library.files import cached
from tests.models.library.test_usage import answer, info


@pytest.fixture
def tiny(hub: Path, tiny_model: Path) -> Path:
    """The tiny model in the cache, under a hostile file name."""
    return cached(hub, "some/tiny-GGUF", "tiny-\x1b[31m.gguf", tiny_model)


def test_the_list_has_the_cache_and_the_folders(tiny: Path, tiny_model_without_template: Path) -> None:
    settings.update({"model": {"folders": [str(tiny_model_without_template.parent)]}})
    done = succeeded("models", "list")
    headings, *lines = done.stdout.splitlines()
    assert headings.split() == ["NAME", "QUANT", "SIZE", "FIT", "TOK/S", "-m", "PLACE", "CONTEXT", "FILE"]
    [of_cache] = [line for line in lines if "some--tiny-GGUF" in line]
    assert of_cache.split()[:5] == ["tiny", "F32", "474", "kB", "fits"]
    [of_folder] = [line for line in lines if str(tiny_model_without_template) in line]
    assert of_folder.split()[-3] == str(tiny_model_without_template.parent)
    assert "\x1b" not in done.stdout
    assert "up to 2× off until measured" in done.stderr


def test_it_is_filtered_by_words_and_sorted_and_names_stay(tiny: Path, tiny_model_without_template: Path) -> None:
    settings.update({"model": {"folders": [str(tiny_model_without_template.parent)]}})
    every = json.loads(run("models", "list", "--json").stdout)
    largest = json.loads(run("models", "ls", "--sort", "size", "--json").stdout)
    assert [one["size"] for one in largest] == sorted((one["size"] for one in every), reverse=True)
    assert json.loads(run("models", "list", "HF", "tiny", "--json").stdout) == [
        one for one in every if one["source"] == "huggingface"
    ]


def test_a_narrow_terminal_keeps_the_figures_and_cuts_no_name_that_is_typed(hub: Path, tiny_model: Path) -> None:
    cached(hub, "some/a-very-long-name-of-a-repository-GGUF", f"{'long-' * 9}F32.gguf", tiny_model)
    shown = pexpect.run(f"{COMMAND[0]} {' '.join(COMMAND[1:])} models list", dimensions=(24, 60), timeout=HANG_GUARD)
    headings, first, *_ = shown.decode().splitlines()
    assert headings.split()[:4] == ["NAME", "QUANT", "SIZE", "FIT"] and "-m" in headings
    assert first.split()[1:5] == ["F32", "474", "kB", "fits"] and "tiny" in first.split()[5:]


@pytest.mark.usefixtures("measured_machine", "one_core")
def test_a_model_that_answered_has_its_speed(tiny: Path) -> None:
    [spec] = [row["spec"] for row in json.loads(run("models", "list", "--json").stdout) if row["source"] != "demo"]
    succeeded("ask", "--model", spec, "--max-tokens", "20", "--drafters", "off", "Hello")
    first, *others = json.loads(run("models", "list", "--json").stdout)
    assert (first["repo"], first["name"], first["path"]) == ("some/tiny-GGUF", "tiny", str(tiny))
    assert (first["damaged"], first["has_template"]) == (None, True)
    assert first["last_used"] == pytest.approx(time.time(), abs=HANG_GUARD)
    assert all(row["last_used"] is row["measured_tok_s"] is None and row["predicted_tok_s"] > 0 for row in others)
    usage.answered(info(Path(first["path"])), answer(41.26))  # that of an answer beside other load is not kept
    headings, line, *_ = run("models", "list").stdout.splitlines()
    assert "USED" in headings
    assert time.strftime("%Y-", time.localtime()) in line


def test_what_is_damaged_comes_last_and_says_so(hub: Path, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my own"
    folder.mkdir()
    (folder / "broken.gguf").write_bytes(b"GGUF")
    settings.update({"model": {"folders": [str(folder)]}})
    done = succeeded("models", "list")
    damaged = done.stdout.splitlines()[-1]
    assert damaged.endswith(f"  {folder}/broken.gguf") and "  damaged  " in damaged
    assert "broken.gguf: damaged: " in done.stderr and "Download it again" in done.stderr
