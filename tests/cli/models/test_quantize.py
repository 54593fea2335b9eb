"""Tests `cpuchat models quantize` as a shell runs it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.models.gguf.header import read_header
from cpuchat.models.quantize.types import PART, TYPES
from cpuchat.models.synthetic.model import write_model
from tests.cli.program import run, succeeded
from tests.support.shapes import TINY_LLAMA
from tests.support.terminal import Terminal
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture
def half(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return write_model(folder / "llama-F16.gguf", TINY_LLAMA, "F16")


def test_the_file_lies_beside_its_source(half: Path) -> None:
    done = succeeded("models", "quantize", str(half), "q4_k_m")
    out = half.with_name("llama-Q4_K_M.gguf")
    assert done.stdout.startswith(str(out))
    assert read_header(out).quantization == "Q4_K_M"
    assert f"llama-F16.gguf → {out}" in done.stderr
    assert f"Start it: `cpuchat -m {out}`" in done.stderr


@pytest.mark.parametrize(
    "place",
    [".cache/huggingface/hub/models--some--llama-GGUF/snapshots/abc", ".lmstudio/models/some/llama-GGUF"],
)
def test_from_a_cache_or_store_it_goes_to_our_own_folder_and_is_listed(half: Path, place: str) -> None:
    (folder := Path.home() / place).mkdir(parents=True)
    (folder / "llama-F16.gguf").symlink_to(half)
    done = run("models", "quantize", "some/llama-GGUF:F16", "Q8_0")
    out = paths.made_models_dir() / "llama-Q8_0.gguf"
    assert done.stdout.startswith(f"{out}  ")
    assert [path.name for path in folder.iterdir()] == ["llama-F16.gguf"]
    listed = {row["path"] for row in json.loads(run("models", "list", "--json").stdout)}
    assert str(out) in listed
    assert run("models", "delete", "synthetic:q8", "--yes").returncode == 3 and out.exists()  # not by a part
    assert run("models", "delete", str(out), "--yes").returncode == 0 and not out.exists()


def test_another_place_and_the_types(half: Path, tmp_path: Path) -> None:
    assert run("models", "quantize", str(half), "Q8_0", str(tmp_path), "--threads", "1").returncode == 0
    out = tmp_path / "llama-Q8_0.gguf"
    assert run("models", "quantize", str(out), "Q8_0", "--output-tensor-type", "Q4_0").returncode == 0
    assert run("models", "quantize", str(half), "Q6_K", str(out)).returncode == 2
    assert run("models", "quantize", str(half), "Q6_K", str(out), "--force").returncode == 0
    assert read_header(out).quantization == "Q6_K"
    assert run("models", "quantize", str(half), "Q4_K_M", "--output-tensor-type", "q4_0").returncode == 0
    made = {tensor.name: tensor.type for tensor in read_header(half.with_name("llama-output-Q4_0-Q4_K_M.gguf")).tensors}
    assert (made["output.weight"], made["token_embd.weight"]) == ("Q4_0", "Q4_K")
    listed = {
        line.split()[0]: line.split()[2:] for line in run("models", "quantize", "--list").stdout.splitlines() if line
    }
    assert {kind.name for kind in TYPES} <= listed.keys()
    assert listed["Q8_0"][0] == "1.00×" and listed["F16"][0].startswith("≈0.")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{half}"], 2, "--list"),
        (["{half}", "Q4_K_M", "out.txt"], 2, ".gguf"),
        (["{half}", "Q4_K_M", "a" * 300 + ".gguf"], 2, "too long"),
        (["{half}", "IQ2_XXS"], 2, "importance matrix"),
        (["{half}", "Q4_K_M", "--token-embedding-type", "Q4_X"], 2, "There is no quantization 'Q4_X'"),
        (["nowhere.gguf", "Q4_K_M"], 3, "no model"),
        (["/nowhere.gguf", "--list"], 3, "no file /nowhere.gguf"),
        (["{cut}", "Q4_K_M"], 4, "damaged"),
        (["{unknown}", "Q4_K_M"], 17, "unknown model architecture"),
    ],
)
def test_refusals(half: Path, tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    cut, unknown = tmp_path / "cut.gguf", write_tiny_gguf(tmp_path / "unknown.gguf")
    cut.write_bytes(half.read_bytes()[:-1000])
    unknown.write_bytes(unknown.read_bytes().replace(b"llama", b"lhama"))
    files = {"half": half, "cut": cut, "unknown": unknown}
    before = sorted([*half.parent.rglob("*.gguf"), *tmp_path.rglob("*.gguf")])
    done = run("models", "quantize", *(argument.format(**files) for argument in arguments))
    assert done.returncode == code
    assert words in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted([*half.parent.rglob("*.gguf"), *tmp_path.rglob("*.gguf")]) == before


def test_ctrl_c_leaves_nothing_behind(slow_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    arguments = ["models", "quantize", str(slow_model), "IQ4_XS", str(out), "--threads", "1"]
    with closing(Terminal(arguments, home=tmp_path / "home")) as terminal:
        terminal.wait_for("tensor ")
        assert out.with_name(out.name + PART).exists()
        terminal.press("ctrl+c")
        assert terminal.wait_for_end() == 130
    assert b"Stopped; the partial file was deleted." in terminal.raw
    assert b"Traceback" not in terminal.raw
    assert not list(tmp_path.glob("out*"))
