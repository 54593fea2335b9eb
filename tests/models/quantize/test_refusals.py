"""Tests what is not quantized, and why; nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
from msgspec.structs import replace

from cpuchat.base.errors import ModelDamaged, ModelNotFound, QuantizeFailed, UsageError
from cpuchat.models.gguf.header import read_header
from cpuchat.models.quantize.make import quantize
from cpuchat.models.quantize.types import PART, MatrixTypes
from cpuchat.models.synthetic.model import write_model
from tests.models.quantize.jobs import job, refused
from tests.support.shapes import TINY_LLAMA
from tests.support.tiny_gguf import finish, write_tiny_gguf

pytestmark = pytest.mark.slow


def test_a_coarse_source_needs_leave(tmp_path: Path) -> None:
    coarse = write_model(tmp_path / "coarse.gguf", TINY_LLAMA, "Q4_K_S")
    error = refused(job(coarse, tmp_path / "out.gguf", "Q3_K_M"), UsageError)
    assert "Q4_K" in error.message and "--allow-requantize" in error.hint
    out = asyncio.run(quantize(job(coarse, tmp_path / "out.gguf", "Q3_K_M", requantize=True)))
    assert read_header(out).quantization == "Q3_K_M"
    fine = write_model(tmp_path / "fine.gguf", TINY_LLAMA, "Q8_0")
    assert asyncio.run(quantize(job(fine, tmp_path / "from-q8.gguf", "Q4_0"))).is_file()


@pytest.mark.parametrize(
    ("changes", "types", "words"),
    [
        ({"tied": True}, MatrixTypes(embedding="Q4_0"), "one matrix for token embeddings and output (tied)"),
        ({"tied": True}, MatrixTypes("Q4_0", "Q4_0"), "one matrix for token embeddings and output (tied)"),
        ({"n_embd": 320}, MatrixTypes(output="Q4_K"), "do not divide the 320 in a row of output.weight"),
        ({"n_embd": 320, "tied": True}, MatrixTypes(output="Q6_K"), "do not divide the 320 in a row of token_embd"),
        ({"n_embd": 320}, MatrixTypes(embedding="Q4_K"), "do not divide the 320 in a row of token_embd.weight"),
        ({}, MatrixTypes(output="Q2_0"), "Q2_0 has no SIMD kernel on this CPU"),
    ],
)
def test_types_of_matrices_that_the_model_or_this_cpu_cannot_have(
    changes: dict[str, Any], types: MatrixTypes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpuchat.models.quantize.types.scalar_types", lambda _: frozenset({"Q2_0"}))
    source = write_model(tmp_path / "m-F16.gguf", replace(TINY_LLAMA, **changes), "F16")
    error = refused(job(source, tmp_path / "out.gguf", "Q8_0", matrices=types), UsageError)
    assert words in error.message and error.hint


def test_nothing_is_overwritten_without_leave(half: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"mine")
    assert "--force" in refused(job(half, out), UsageError).hint
    assert out.read_bytes() == b"mine"
    asyncio.run(quantize(job(half, out, force=True)))
    assert read_header(out).quantization == "Q4_K_M"


def test_a_model_is_never_written_into_itself(half: Path, tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(half.read_bytes())
    (tmp_path / "link.gguf").symlink_to(source)
    (tmp_path / "hard.gguf").hardlink_to(source)
    for out in ("m.gguf", "link.gguf", "hard.gguf"):
        assert "into itself" in refused(job(source, tmp_path / out, force=True), UsageError).message
    assert source.read_bytes() == half.read_bytes()


def test_places_that_cannot_be_written(half: Path, tmp_path: Path) -> None:
    assert "no folder" in refused(job(half, tmp_path / "nowhere/out.gguf"), UsageError).message
    (tmp_path / "folder.gguf").mkdir()
    assert "is a folder" in refused(job(half, tmp_path / "folder.gguf"), UsageError).message
    for length in (250, 300):  # the name of the unfinished file is too long, and the name itself
        assert "too long" in refused(job(half, tmp_path / f"{'a' * (length - 5)}.gguf"), UsageError).message


def test_one_program_at_a_time_writes_a_file(half: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / f"out.gguf{PART}").symlink_to(tmp_path / "mine")
    assert "another program is writing out.gguf" in refused(job(half, tmp_path / "out.gguf"), UsageError).message
    assert (tmp_path / "mine").read_bytes() == b"mine"
    (tmp_path / f"out.gguf{PART}").unlink()
    assert asyncio.run(quantize(job(half, tmp_path / "out.gguf"))).is_file()
    assert not (tmp_path / f"out.gguf{PART}").exists()


def test_sources_that_are_no_models(half: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    refused(job(tmp_path / "nowhere.gguf", out), ModelNotFound)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(half.read_bytes()[:-1000])
    refused(job(cut, out), ModelDamaged)
    unknown = write_tiny_gguf(tmp_path / "unknown.gguf")
    unknown.write_bytes(unknown.read_bytes().replace(b"llama", b"lhama"))
    assert "unknown model architecture: 'lhama'" in refused(job(unknown, out), QuantizeFailed).message
    projector = reference.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    projector.add_tensor("v.patch_embd.weight", np.zeros((32, 32), np.float32))
    finish(projector)
    assert "not a language model" in refused(job(tmp_path / "mmproj.gguf", out), UsageError).message
