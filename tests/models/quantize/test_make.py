"""Tests quantizing with the real llama.cpp in its real process: what comes out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from cpuchat.base.errors import UsageError
from cpuchat.models.file_names import quantization_of
from cpuchat.models.gguf.header import read_header, read_model
from cpuchat.models.quantize.make import QuantizeProgress, quantize
from cpuchat.models.quantize.types import (
    TYPES,
    Forecast,
    MatrixTypes,
    QuantizeProcess,
    forecast_type,
    quant_type,
    source_header,
    suggested_path,
)
from cpuchat.models.synthetic.model import write_model
from tests.models.llama import Llama
from tests.models.quantize.jobs import copy, job, refused
from tests.support.edited_gguf import edited
from tests.support.shapes import TINY_LLAMA
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def foreseen(half: Path) -> dict[str, Forecast]:
    """Return the forecasts of all types."""

    async def ask() -> dict[str, Forecast]:
        header = await source_header(half)
        async with QuantizeProcess() as process:
            return {kind.name: await forecast_type(process, header, kind) for kind in TYPES}

    return asyncio.run(ask())


@pytest.mark.parametrize("kind", ["Q4_K_M", "IQ4_XS"])
def test_the_file_is_the_one_that_was_foreseen_and_it_runs(
    half: Path, foreseen: dict[str, Forecast], tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out.gguf"
    seen: list[QuantizeProgress] = []
    assert asyncio.run(quantize(job(half, out, kind), seen.append)) == out
    header, result = read_header(out), foreseen[kind].header
    assert header.quantization == kind
    assert {(t.name, t.type, t.nbytes) for t in header.tensors} == {(t.name, t.type, t.nbytes) for t in result.tensors}
    assert abs(header.file_size - result.file_size) < 256
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]
    with Llama(out) as llama:
        assert len(llama.greedy([1, 2, 3], 3)) == 3
    assert [one.done_tensors for one in seen] == sorted(one.done_tensors for one in seen)
    assert {one.tensors for one in seen} == {len(header.tensors)}
    assert {one.tensor for one in seen} <= {t.name for t in header.tensors}
    assert {one.total_out for one in seen} == {result.file_size}


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf")
    parts = [
        copy(whole, tmp_path / f"m-F32-{no + 1:05d}-of-00003.gguf", settings=no == 0, first=no, every=3, no=no, count=3)
        for no in range(3)
    ]
    assert suggested_path(read_model(parts[1]), quant_type("Q8_0"), tmp_path).name == "m-Q8_0.gguf"
    out = asyncio.run(quantize(job(parts[1], tmp_path / "out.gguf", "Q8_0")))
    assert read_header(out).split_count == 1
    assert {t.name for t in read_header(out).tensors} == {t.name for t in read_model(parts[0]).tensors}
    with Llama(out) as llama:
        assert len(llama.greedy([1, 2, 3], 2)) == 2
    error = refused(job(parts[0], parts[2], "Q8_0", force=True), UsageError)
    assert "into itself" in error.message


def test_a_source_with_another_alignment(tmp_path: Path) -> None:
    """llama.cpp copies the setting but aligns to 32: left alone, its file could not be read."""
    source = copy(write_tiny_gguf(tmp_path / "whole.gguf"), tmp_path / "source.gguf", alignment=4096)
    assert read_header(source).alignment == 4096
    out = asyncio.run(quantize(job(source, tmp_path / "out.gguf", "Q8_0")))
    with Llama(out) as llama:
        assert len(llama.greedy([1, 2, 3], 2)) == 2


@pytest.mark.parametrize(
    ("tied", "types", "expected"),
    [
        (False, MatrixTypes(output="Q4_0"), {"output.weight": "Q4_0", "token_embd.weight": "Q4_K"}),
        (False, MatrixTypes("Q8_0", "Q2_K"), {"output.weight": "Q8_0", "token_embd.weight": "Q2_K"}),
        (True, MatrixTypes(output="Q4_0"), {"token_embd.weight": "Q4_0"}),
    ],
)
def test_output_and_embeddings_get_types_of_their_own_and_nothing_else_does(
    tmp_path: Path, tied: bool, types: MatrixTypes, expected: dict[str, str]
) -> None:
    source = write_model(tmp_path / "m-F16.gguf", replace(TINY_LLAMA, tied=tied), "F16")
    plain = read_header(asyncio.run(quantize(job(source, tmp_path / "plain.gguf"))))
    out = suggested_path(read_header(source), quant_type("Q4_K_M"), tmp_path, types)
    made = read_header(asyncio.run(quantize(job(source, out, matrices=types))))
    assert out.name.startswith("m-output-Q") and quantization_of(out.name) == made.quantization == "Q4_K_M"
    usual = {tensor.name: tensor.type for tensor in plain.tensors}
    assert {tensor.name: tensor.type for tensor in made.tensors} == usual | expected
    with Llama(out) as llama:
        assert len(llama.greedy([1, 2, 3], 2)) == 2


def test_of_a_model_that_has_the_type_already_only_the_output_changes(tmp_path: Path) -> None:
    """Publishers mix types in their own ways under the same name: nothing else is to lose quality twice."""
    mixed = write_model(tmp_path / "mixed.gguf", TINY_LLAMA, "Q6_K")
    source = edited(mixed, tmp_path / "m-Q4_K_M.gguf", {"general.file_type": quant_type("Q4_K_M").number})
    out = asyncio.run(quantize(job(source, tmp_path / "out.gguf", matrices=MatrixTypes("Q4_0"), requantize=True)))
    before, made = read_header(source), read_header(out)
    assert made.quantization == before.quantization == "Q4_K_M"
    types = {tensor.name: tensor.type for tensor in before.tensors}
    assert {tensor.name: tensor.type for tensor in made.tensors} == types | {"output.weight": "Q4_0"}


def test_types_by_name() -> None:
    assert quant_type("q4_k_m").name == quant_type(" Q4_K ").name == "Q4_K_M"
    assert quant_type("mxfp4_moe").name == "MXFP4"
    with pytest.raises(UsageError, match="Did you mean Q4_K_M"):
        quant_type("Q4_KM")
    with pytest.raises(UsageError, match="--list"):
        quant_type("\x1b[31m")
    with pytest.raises(UsageError, match="requires an importance matrix"):
        quant_type("IQ2_XS")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("m-F16.gguf", "m-Q4_K_M.gguf"),
        ("m.f16.gguf", "m-q4_k_m.gguf"),
        ("m.gguf", "m-Q4_K_M.gguf"),
        ("M-q8_0-from-q4.gguf", "M-from-q4-q4_k_m.gguf"),
    ],
)
def test_names_are_suggested(half: Path, tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / name).symlink_to(half)
    assert suggested_path(read_header(tmp_path / name), quant_type("Q4_K_M"), tmp_path) == tmp_path / expected
