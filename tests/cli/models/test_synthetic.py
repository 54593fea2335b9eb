"""Tests `cpuchat models synthetic`: files that the engine then really runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpuchat.models.gguf.header import read_header
from cpuchat.models.synthetic.model import SHAPES
from tests.cli.program import run


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
