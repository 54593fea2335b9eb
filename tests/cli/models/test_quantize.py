"""Tests `cpuchat models quantize` as a shell runs it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.models.gguf.header import read_header
from cpuchat.models.quantize.types import PART, TYPES
from cpuchat.models.synthetic.model import write_model
from tests.cli.program import COMMAND, HANG_GUARD, run
from tests.support.shapes import TINY_LLAMA
from tests.support.terminal import Terminal
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture
def half(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return write_model(folder / "llama-F16.gguf", TINY_LLAMA, "F16")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a source that takes long enough to be stopped."""
    folder = tmp_path_factory.mktemp("source")
    return write_tiny_gguf(folder / "large-F32.gguf", n_embd=512, n_layer=6, n_ff=2048, n_head=8)


def test_the_file_lies_beside_its_source(half: Path) -> None:
    done = run("models", "quantize", str(half), "q4_k_m")
    assert done.returncode == 0, done.stderr
    out = half.with_name("llama-Q4_K_M.gguf")
    assert done.stdout.startswith(str(out))
    assert read_header(out).quantization == "Q4_K_M"
    assert "llama-F16.gguf → llama-Q4_K_M.gguf" in done.stderr
    assert "Q4_K is " in done.stderr and "At load on this CPU" in done.stderr
    assert "`cpuchat models list` does not search this folder" in done.stderr


def test_from_a_cache_it_goes_to_our_own_folder_and_is_listed(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub/models--some--llama-GGUF/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "llama-F16.gguf").symlink_to(half)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    done = run("models", "quantize", "some/llama-GGUF:F16", "Q8_0", "--json")
    out = paths.made_models_dir() / "llama-Q8_0.gguf"
    assert json.loads(done.stdout) == {"path": str(out), "type": "Q8_0", "size": out.stat().st_size}
    assert done.stderr == ""
    assert [path.name for path in snapshot.iterdir()] == ["llama-F16.gguf"]
    listed = {row["path"] for row in json.loads(run("models", "list", "--json").stdout)}
    assert str(out) in listed
    assert run("models", "delete", str(out), "--yes").returncode == 0
    assert not out.exists()


def test_another_place(half: Path, tmp_path: Path) -> None:
    assert run("models", "quantize", str(half), "Q8_0", str(tmp_path), "--threads", "1").returncode == 0
    out = tmp_path / "llama-Q8_0.gguf"
    assert read_header(out).quantization == "Q8_0"
    assert run("models", "quantize", str(half), "Q6_K", str(out)).returncode == 2
    assert run("models", "quantize", str(half), "Q6_K", str(out), "--force").returncode == 0
    assert read_header(out).quantization == "Q6_K"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{half}"], 2, "--list"),
        (["{half}", "Q4_K_M", "out.txt"], 2, ".gguf"),
        (["{half}", "Q4_K_M", "a" * 300 + ".gguf"], 2, "too long"),
        (["{half}", "IQ2_XXS"], 2, "importance matrix"),
        (["nowhere.gguf", "Q4_K_M"], 3, "no model"),
        (["{cut}", "Q4_K_M"], 4, "damaged"),
        (["{unknown}", "Q4_K_M"], 17, "unknown model architecture"),
    ],
)
def test_refusals(half: Path, tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    cut, unknown = tmp_path / "cut.gguf", write_tiny_gguf(tmp_path / "unknown.gguf")
    cut.write_bytes(half.read_bytes()[:-1000])
    unknown.write_bytes(unknown.read_bytes().replace(b"llama", b"lhama"))
    files = {"half": half, "cut": cut, "unknown": unknown}
    before = sorted([*half.parent.iterdir(), *tmp_path.iterdir()])
    done = run("models", "quantize", *(argument.format(**files) for argument in arguments))
    assert done.returncode == code
    assert words in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted([*half.parent.iterdir(), *tmp_path.iterdir()]) == before


def test_the_types_are_listed() -> None:
    done = run("models", "quantize", "--list")
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert {kind.name for kind in TYPES} <= set(listed)


def test_the_types_of_a_source_are_told_exactly(half: Path) -> None:
    rows = {row["type"]: row for row in json.loads(run("models", "quantize", "--list", str(half), "--json").stdout)}
    assert set(rows) == {kind.name for kind in TYPES}
    assert rows["Q8_0"]["size"] < rows["F16"]["size"] < rows["F32"]["size"]
    assert 1.8 < rows["Q8_0"]["speed_up"] < 1.9
    assert rows["Q4_K_M"]["fit"] == "fits" and rows["Q4_K_M"]["requantizes"] == []


def test_types_that_a_model_cannot_have_are_told(tiny_model: Path) -> None:
    """Rows of 64 values do not fill a block of Q1_0, for which llama.cpp has no other type to fall back on."""
    rows = {
        row["type"]: row for row in json.loads(run("models", "quantize", "--list", str(tiny_model), "--json").stdout)
    }
    assert "no tensor type fallback" in rows["Q1_0"]["problem"]
    assert rows["Q4_K_M"]["size"]


def test_ctrl_c_leaves_nothing_behind(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    terminal = Terminal(
        ["models", "quantize", str(large), "IQ4_XS", str(out), "--threads", "1"], home=tmp_path / "home"
    )
    terminal.wait_for("tensor ")
    assert out.with_name(out.name + PART).exists()
    terminal.press("ctrl+c")
    assert terminal.wait_for_end() == 130
    assert b"Stopped; the partial file was deleted." in terminal.raw
    assert b"Traceback" not in terminal.raw
    assert not list(tmp_path.glob("out*"))
    terminal.close()


def test_killed_it_takes_the_work_along(large: Path, tmp_path: Path) -> None:
    """kill -9 of the program: the process that works for it ends, and its file goes."""
    part = tmp_path / f"out.gguf{PART}"
    arguments = ["models", "quantize", str(large), "IQ4_XS", str(tmp_path / "out.gguf"), "--threads", "1"]
    program = subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not part.exists() or not part.stat().st_size:
            assert program.poll() is None
        worker = int(Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()[0])
        handle = os.pidfd_open(worker)
    finally:
        program.send_signal(signal.SIGKILL)
        program.communicate(timeout=HANG_GUARD)
    assert select.select([handle], [], [], HANG_GUARD)[0]  # it is gone
    os.close(handle)
    assert not part.exists()
