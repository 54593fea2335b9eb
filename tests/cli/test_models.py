"""`cpuchat models`: the list and the synthetic files, which the engine then really runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cpuchat.models.gguf import read_header
from cpuchat.models.synthetic import SHAPES
from tests.cli.program import HANG_GUARD, run, start


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def cached(hub: Path, tiny_model: Path) -> Path:
    """The tiny model as the Hugging Face client would have stored it, under a hostile file name."""
    revision = hub / "models--some--tiny-GGUF" / "snapshots" / "abc"
    revision.mkdir(parents=True)
    (revision / "tiny-\x1b[31m.gguf").symlink_to(tiny_model)
    return hub


def folder_setting(folder: Path) -> None:
    file = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(f"[model]\nfolders = [{json.dumps(str(folder))}]\n")


def test_the_list_has_the_cache_and_the_folders(cached: Path, tiny_model_without_template: Path) -> None:
    folder_setting(tiny_model_without_template.parent)
    done = run("models", "list")
    assert done.returncode == 0, done.stderr
    assert "some/tiny-GGUF:" in done.stdout
    assert str(tiny_model_without_template) in done.stdout
    assert "\x1b" not in done.stdout


def test_what_the_list_says_is_what_model_takes(cached: Path) -> None:
    [spec] = [row["spec"] for row in json.loads(run("models", "list", "--json").stdout) if row["source"] != "demo"]
    done = run("ask", "--model", spec, "--max-tokens", "1", "Hello")
    assert done.returncode == 0, done.stderr


def test_the_json_list_holds_plain_figures(cached: Path, tiny_model: Path) -> None:
    rows = json.loads(run("models", "list", "--json").stdout)
    [row] = [row for row in rows if row["source"] == "huggingface"]
    assert row["repo"] == "some/tiny-GGUF"
    assert row["name"] == "tiny"
    assert row["size"] == tiny_model.stat().st_size
    assert row["damaged"] is None


def test_a_damaged_file_is_listed_with_what_is_wrong(hub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "broken.gguf").write_bytes(b"GGUF")
    folder_setting(folder)
    done = run("models", "list")
    assert done.returncode == 0, done.stderr
    assert "broken" in done.stdout
    assert "damaged" in done.stdout


def test_a_pair_that_fits(hub: Path) -> None:
    done = run("models", "pair", "demo", "demo-draft")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cpuchat-demo-draft-1m-q8_0.gguf can draft for cpuchat-demo-8m-q8_0.gguf.\n"
    again = json.loads(run("models", "pair", "demo", "demo-draft", "--json").stdout)
    assert (again["ok"], again["reason"], again["hint"], again["note"]) == (True, "", "", "")
    assert Path(again["draft"]).name == "cpuchat-demo-draft-1m-q8_0.gguf"


def test_a_pair_that_does_not_fit_says_why_and_what_would(hub: Path, tiny_model: Path) -> None:
    done = run("models", "pair", "demo", str(tiny_model))
    assert done.returncode == 12
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first.startswith("tiny-F32.gguf cannot draft for cpuchat-demo-8m-q8_0.gguf: its vocabulary has 272 tokens")
    assert "cpuchat-demo-draft-1m-q8_0.gguf" in second
    as_json = run("models", "pair", "demo", str(tiny_model), "--json")
    assert as_json.returncode == 12
    assert json.loads(as_json.stdout)["ok"] is False


def test_a_draft_that_is_larger_is_noted(hub: Path) -> None:
    done = run("models", "pair", "demo-draft", "demo")
    assert done.returncode == 0
    assert "not smaller" in done.stdout


def test_without_a_draft_those_that_fit_are_listed(hub: Path, tiny_model: Path) -> None:
    done = run("models", "pair", "demo")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["demo-draft", "demo-q4"]
    specs = [row["spec"] for row in json.loads(run("models", "pair", "demo", "--json").stdout)["drafts"]]
    assert specs == ["demo-draft", "demo-q4"]
    none = run("models", "pair", str(tiny_model))
    assert none.returncode == 12
    assert none.stdout == ""
    assert "272" in none.stderr


def test_pairs_of_files_that_are_not_there_or_broken(hub: Path, tmp_path: Path) -> None:
    assert run("models", "pair", "demo", str(tmp_path / "none.gguf")).returncode == 3
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    done = run("models", "pair", "demo", str(broken))
    assert done.returncode == 4
    assert "broken.gguf" in done.stderr


def test_a_synthetic_model_is_written_and_answers(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    done = run("models", "synthetic", "tiny", str(out), "--quant", "Q4_0", "--layers", "1")
    assert done.returncode == 0, done.stderr
    assert str(out) in done.stdout
    assert read_header(out).quantization == "Q4_0"
    answer = run("ask", "--model", str(out), "--max-tokens", "4", "--json", "Hello")
    assert answer.returncode == 0, answer.stdout
    assert json.loads(answer.stdout)["timings"]["predicted_n"] == 4


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for file, seed in zip(files, "112", strict=True):
        assert run("models", "synthetic", "tiny", str(file), "--seed", seed).returncode == 0
    first, second, third = (file.read_bytes() for file in files)
    assert first == second
    assert first != third


def test_a_pair_is_two_files(tmp_path: Path) -> None:
    target, draft = tmp_path / "t.gguf", tmp_path / "d.gguf"
    done = run(
        "models", "synthetic", "tiny", str(target), "--pair-alpha", "0.8", "--draft-out", str(draft),
        "--draft-shape", "tiny",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_header(target).n_vocab == read_header(draft).n_vocab


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["huge", "m.gguf"], "huge"),
        (["tiny", "m.gguf", "--quant", "Q9"], "Q9"),
        (["tiny", "m.gguf", "--layers", "0"], "--layers"),
        (["tiny", "m.gguf", "--pair-alpha", "1.5"], "1.5"),
        (["tiny", "m.gguf", "--draft-out", "d.gguf"], "--pair-alpha"),
        (["tiny", "m.gguf", "--pair-alpha", "0.5", "--draft-out", "m.gguf"], "same file"),
    ],
)
def test_wrong_wishes_are_refused_and_write_nothing(
    arguments: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    done = run("models", "synthetic", *arguments)
    assert done.returncode == 2
    assert word in done.stderr
    assert not list(tmp_path.glob("*.gguf"))


def test_a_file_that_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    out.write_text("precious")
    done = run("models", "synthetic", "tiny", str(out))
    assert done.returncode == 2
    assert out.read_text() == "precious"
    assert run("models", "synthetic", "tiny", str(out), "--force").returncode == 0
    assert read_header(out).n_vocab


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = run("models", "synthetic", "tiny", str(tmp_path / "none" / "m.gguf"))
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr


def test_help_names_every_shape() -> None:
    text = " ".join(run("models", "synthetic", "--help").stdout.split())
    for shape in SHAPES:
        assert shape in text


def test_a_reader_that_goes_away_ends_the_list_quietly(cached: Path) -> None:
    process = start("models", "list")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(HANG_GUARD) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
