"""Tests `cpuchat models pair`: which draft fits, what it is expected to gain, and what the catalog names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.costs.calibrations import Calibration, Calibrations
from cpuchat.models.file_names import file_fingerprint
from cpuchat.models.library.places import DEMO_FILES
from tests.cli.program import run
from tests.models.drafts.files import WORDS, header_file, write_catalog
from tests.support.edited_gguf import edited
from tests.support.hub_server import HubServer

DEMO = paths.demo_dir() / DEMO_FILES["demo"]
DRAFT = paths.demo_dir() / DEMO_FILES["demo-draft"]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def remember_costs(target: Path, draft: Path) -> None:
    """Save calibrations of the pair: cheap verify passes, a fast draft model."""
    files = {"target": file_fingerprint(target), "draft": file_fingerprint(draft)}
    costs = Calibration(tuple(40.0 + n for n in range(32)), draft_ms=2.0, **files)
    Calibrations(paths.calibration_file()).save("a" * 64, costs)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a model for which the user's catalog names Small and Other, neither of which is on this machine."""
    write_catalog(
        ("big", "Big", 4096e-9, ["small", "other"]), ("small", "Small", 8e-9, []), ("other", "Other", 16e-9, [])
    )
    return header_file(tmp_path / "Big-Q8_0.gguf", weights=4096)


def test_a_pair_that_fits() -> None:
    done = run("models", "pair", "demo", "demo-draft")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "cpuchat-demo-draft-1m-q8_0.gguf can draft for cpuchat-demo-8m-q8_0.gguf."
    assert "not calibrated yet" in second
    again = json.loads(run("models", "pair", "demo", "demo-draft", "--json").stdout)
    assert (again["ok"], again["reason"], again["hint"], again["note"]) == (True, "", "", "")
    assert Path(again["draft"]).name == "cpuchat-demo-draft-1m-q8_0.gguf"
    assert again["expected"]["gains"] == []


def test_what_the_engine_measured_tells_the_gain() -> None:
    remember_costs(DEMO, DRAFT)
    done = run("models", "pair", "demo", "demo-draft")
    assert "× in prose, " in done.stdout.splitlines()[1]
    expected = json.loads(run("models", "pair", "demo", "demo-draft", "--json").stdout)["expected"]
    assert expected["draft_ms"] == 2.0
    assert [gain["kind"] for gain in expected["gains"]] == ["prose", "code"]
    assert 1 < expected["gains"][0]["speedup"] < expected["gains"][1]["speedup"]
    assert "measured here" in expected["why"]
    listed = run("models", "pair", "demo").stdout.splitlines()
    assert "recommended" in next(line for line in listed if line.startswith("demo-draft"))


def test_a_pair_that_does_not_fit_says_why_and_what_would(tiny_model: Path) -> None:
    done = run("models", "pair", "demo", str(tiny_model))
    assert done.returncode == 12
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first.startswith("tiny-F32.gguf cannot draft for cpuchat-demo-8m-q8_0.gguf: its vocabulary has 272 tokens")
    assert "cpuchat-demo-draft-1m-q8_0.gguf" in second
    as_json = run("models", "pair", "demo", str(tiny_model), "--json")
    assert as_json.returncode == 12
    told = json.loads(as_json.stdout)
    assert told["ok"] is False
    assert told["expected"] is None


def test_a_draft_that_is_larger_is_noted() -> None:
    done = run("models", "pair", "demo-draft", "demo")
    assert done.returncode == 0
    assert "not smaller" in done.stdout


def test_without_a_draft_those_that_fit_are_listed(tiny_model: Path) -> None:
    done = run("models", "pair", "demo")
    assert done.returncode == 0, done.stderr
    headings, *rows = done.stdout.split("\n\n")[0].splitlines()
    assert headings.startswith("DRAFT MODEL")
    assert [line.split()[0] for line in rows] == ["demo-draft"]
    rows = json.loads(run("models", "pair", "demo", "--json").stdout)["drafts"]
    assert [(row["spec"], row["fits"]) for row in rows] == [("demo-draft", True)]
    none = run("models", "pair", str(tiny_model))
    assert none.returncode == 12
    assert none.stdout == ""
    assert "272" in none.stderr


def test_what_the_catalog_names_is_listed_without_a_request(target: Path) -> None:
    done = run("models", "pair", str(target))
    assert done.returncode == 12
    assert "No smaller local model can draft" in done.stderr
    lines = done.stdout.splitlines()
    assert "owner/Small-GGUF:Q8_0" in lines[2]
    assert "not checked" in lines[2]
    assert "recommended" in lines[2]
    assert "owner/Other-GGUF:Q8_0" in lines[3]


def test_those_on_the_hub_are_checked_when_asked(tmp_path: Path, target: Path, hub_server: HubServer) -> None:
    hub_server.add("owner/Small-GGUF", {"Small-Q8_0.gguf": header_file(tmp_path / "on hub/small.gguf")})
    stranger = header_file(tmp_path / "on hub/other.gguf", [*WORDS[:200], "\x1b[31m", *WORDS[201:]])
    hub_server.add("owner/Other-GGUF", {"Other-Q8_0.gguf": stranger})
    done = run("models", "pair", str(target), "--hub")
    assert "\x1b" not in done.stdout
    first, second = done.stdout.splitlines()[2:4]
    assert "fits" in first
    assert "does not fit" in second
    assert "owner/Other-GGUF:Q8_0 does not fit: token 200" in " ".join(done.stdout.split())
    rows = json.loads(run("models", "pair", str(target), "--hub", "--json").stdout)["hub"]
    assert [(row["fits"], row["path"]) for row in rows] == [(True, None), (False, None)]


def test_a_hub_that_does_not_answer_is_told_in_the_row(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run("models", "pair", str(target), "--hub")
    assert done.returncode == 12
    assert done.stdout.count("not checked") == 2
    assert done.stdout.count("Not checked: Offline mode") == 1
    assert "Traceback" not in done.stderr


@pytest.fixture
def named_pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return a copy of the demo model in a folder of the settings, and the path of the draft model that the user's
    catalog names for it."""
    write_catalog(("big", "Big", 0.0085, ["small"]), ("small", "Small", 0.0011, []))
    folder = tmp_path / "mine"
    folder.mkdir()
    paths.settings_file().write_text(f'[model]\nfolders = ["{folder}"]\n')
    return Path(shutil.copy(DEMO, folder / "Big-Q8_0.gguf")), folder / "Small-Q8_0.gguf"


@pytest.mark.usefixtures("measured_machine", "one_core")
def test_a_draft_that_the_catalog_names_is_loaded_beside_its_target(named_pair: tuple[Path, Path]) -> None:
    target, draft = named_pair
    shutil.copy(DRAFT, draft)
    ask = ("ask", "--model", str(target), "--max-tokens", "4", "Hello")
    assert "drafts: " not in run(*ask).stderr  # one question is not worth measuring, and so not worth loading it
    remember_costs(target, draft)
    done = run(*ask)
    assert done.returncode == 0, done.stderr
    assert "recommended by the catalog for Big" in done.stderr
    assert json.loads(run("ask", "--json", *ask[1:]).stdout)["draft_model"]


@pytest.mark.usefixtures("measured_machine", "one_core")
def test_a_draft_that_the_engine_cannot_load_is_not_said_to_draft(named_pair: tuple[Path, Path]) -> None:
    target, draft = named_pair
    edited(DRAFT, draft, {"llama.feed_forward_length": 64})
    remember_costs(target, draft)
    done = run("ask", "--model", str(target), "--max-tokens", "4", "Hello")
    assert done.returncode == 0, done.stderr
    assert "No draft model: " in done.stderr
    assert "recommended by the catalog" not in done.stderr


def test_pairs_of_files_that_are_not_there_or_broken(tmp_path: Path) -> None:
    assert run("models", "pair", "demo", str(tmp_path / "none.gguf")).returncode == 3
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    for arguments in (["demo", str(broken)], [str(broken)]):
        done = run("models", "pair", *arguments)
        assert done.returncode == 4
        assert "broken.gguf" in done.stderr
