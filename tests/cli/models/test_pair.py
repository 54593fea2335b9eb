"""Tests `cpuchat models pair`: which draft fits, what it is expected to gain, and what the catalog names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.costs.calibrations import PassCosts
from cpuchat.measure.subject import Subject
from cpuchat.models.costs import keep_calibration
from cpuchat.models.file_names import file_fingerprint
from cpuchat.models.library.places import DEMO_FILES
from tests.cli.program import run, succeeded
from tests.models.drafts.files import header_file, write_catalog

DEMO = paths.demo_dir() / DEMO_FILES["demo"]
DRAFT = paths.demo_dir() / DEMO_FILES["demo-draft"]


def remember_costs(target: Path, draft: Path) -> None:
    """Save calibrations of the pair: cheap verify passes, a fast draft model."""
    files = (file_fingerprint(target), file_fingerprint(draft))
    keep_calibration(Subject(model=files), PassCosts(tuple(40.0 + n for n in range(32)), draft_ms=2.0))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a model for which the user's catalog names Small and Other, neither of which is on this machine."""
    write_catalog(
        ("big", "Big", 4096e-9, ["small", "other"]), ("small", "Small", 8e-9, []), ("other", "Other", 16e-9, [])
    )
    return header_file(tmp_path / "Big-Q8_0.gguf", weights=4096)


def test_a_pair_that_fits_and_what_the_engine_measured_tells_the_gain() -> None:
    remember_costs(DEMO, DRAFT)
    done = succeeded("models", "pair", "demo", "demo-draft")
    first, second = done.stdout.splitlines()
    assert first == "cpuchat-demo-draft-1m-q8_0.gguf can draft for cpuchat-demo-8m-q8_0.gguf."
    assert "× in prose, " in second
    told = json.loads(run("models", "pair", "demo", "demo-draft", "--json").stdout)
    assert (told["ok"], told["reason"], told["note"]) == (True, "", "")
    expected = told["expected"]
    assert expected["draft_ms"] == 2.0
    assert [gain["kind"] for gain in expected["gains"]] == ["prose", "code"]
    assert 1 < expected["gains"][0]["speedup"] < expected["gains"][1]["speedup"]
    assert "measured here" in expected["why"]
    listed = run("models", "pair", "demo").stdout.splitlines()
    assert "recommended" in next(line for line in listed if line.startswith("demo-draft"))


def test_a_pair_that_does_not_fit_says_why(tiny_model: Path) -> None:
    done = run("models", "pair", "demo", str(tiny_model))
    assert done.returncode == 12
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first.startswith("tiny-F32.gguf cannot draft for cpuchat-demo-8m-q8_0.gguf: its vocabulary has 272 tokens")
    assert "`cpuchat models pair MODEL` lists the models that fit" in second
    as_json = run("models", "pair", "demo", str(tiny_model), "--json")
    assert as_json.returncode == 12
    told = json.loads(as_json.stdout)
    assert told["ok"] is False
    assert told["expected"] is None


def test_without_a_draft_those_that_fit_are_listed(tiny_model: Path) -> None:
    done = succeeded("models", "pair", "demo")
    headings, *rows = done.stdout.split("\n\n")[0].splitlines()
    assert headings.startswith("DRAFT MODEL")
    assert [line.split()[0] for line in rows] == ["demo-draft"]
    rows = json.loads(run("models", "pair", "demo", "--json").stdout)["drafts"]
    assert [(row["spec"], row["fits"]) for row in rows] == [("demo-draft", True)]
    none = run("models", "pair", str(tiny_model))
    assert none.returncode == 12
    assert none.stdout == ""


def test_what_the_catalog_names_is_listed_without_a_request(target: Path) -> None:
    done = run("models", "pair", str(target))
    assert done.returncode == 12
    assert "No smaller local model can draft" in done.stderr
    lines = done.stdout.splitlines()
    assert "owner/Small-GGUF:Q8_0" in lines[1]
    assert "not checked" in lines[1] and "owner/Other-GGUF:Q8_0" in lines[2]
