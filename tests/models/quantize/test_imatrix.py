"""Tests importance matrices: read in both formats, obeyed, and refused when they are not sound."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from cpuchat.base.errors import ModelDamaged, ModelNotFound, QuantizeFailed, UsageError
from cpuchat.models.gguf.header import read_header
from cpuchat.models.quantize.make import quantize
from tests.models.quantize.jobs import finish, job, refused, weights

pytestmark = pytest.mark.slow


def importance(path: Path, source: Path, *, old: bool = False, scale: float = 1.0) -> Path:
    """Return an importance matrix for all weight matrices of `source` in which the first half of the inputs matters
    most."""
    matrices = {t.name: t.shape[0] for t in read_header(source).tensors if len(t.shape) == 2}
    sums = {name: np.repeat(np.float32([9 * scale, scale]), n // 2) for name, n in matrices.items()}
    if old:
        entries = [
            struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 3, len(v)) + v.tobytes()
            for name, v in sums.items()
        ]
        path.write_bytes(struct.pack("<i", len(entries)) + b"".join(entries) + struct.pack("<i", 7))
        return path
    writer = reference.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in sums.items():
        writer.add_tensor(f"{name}.in_sum2", values[None, :])
        writer.add_tensor(f"{name}.counts", np.float32([[3]]))
    finish(writer)
    return path


def test_the_smallest_types_need_an_importance_matrix(half: Path, tmp_path: Path) -> None:
    error = refused(job(half, tmp_path / "out.gguf", "IQ2_XS"), UsageError)
    assert "importance matrix" in error.message and "--imatrix" in error.hint
    new, old = importance(tmp_path / "new.gguf", half), importance(tmp_path / "old.dat", half, old=True)
    made = [
        asyncio.run(quantize(job(half, tmp_path / f"{given.stem}-out.gguf", "Q2_K_S", imatrix=given)))
        for given in (new, old)
    ]
    header = read_header(made[0])
    assert header.quantization == "Q2_K_S"
    assert header.metadata["quantize.imatrix.file"] == "new.gguf"
    assert header.metadata["quantize.imatrix.chunks_count"] == 7
    # Both files say the same, so the same comes out: weights, not settings, which hold the file's name.
    first, second = (reference.GGUFReader(path).tensors for path in made)
    assert all(np.array_equal(a.data, b.data) for a, b in zip(first, second, strict=True))


def test_an_importance_matrix_is_obeyed(half: Path, tmp_path: Path) -> None:
    """What it calls important becomes more exact, the rest less."""
    matrix = importance(tmp_path / "matrix.gguf", half)
    plain = asyncio.run(quantize(job(half, tmp_path / "plain.gguf", "Q2_K")))
    guided = asyncio.run(quantize(job(half, tmp_path / "guided.gguf", "Q2_K", imatrix=matrix)))

    source = weights(half)

    def error(path: Path, columns: slice) -> float:
        return sum(
            float(((source[name] - values)[:, columns] ** 2).sum())
            for name, values in weights(path).items()
            if "ffn_down" in name
        )

    n = source["blk.0.ffn_down.weight"].shape[1]
    important, rest = slice(0, n // 2), slice(n // 2, n)
    assert error(guided, important) / error(guided, rest) < error(plain, important) / error(plain, rest)


@pytest.mark.parametrize("old", [False, True])
def test_damaged_importance_matrices_are_refused(half: Path, tmp_path: Path, old: bool) -> None:
    whole = importance(tmp_path / "whole", half, old=old).read_bytes()
    cut, broken = tmp_path / "cut", tmp_path / "broken"
    cut.write_bytes(whole[: len(whole) // 2])
    refused(job(half, tmp_path / "out.gguf", "Q4_K_M", imatrix=cut), ModelDamaged)
    importance(broken, half, old=old, scale=float("inf"))
    assert "not finite" in refused(job(half, tmp_path / "out.gguf", imatrix=broken), ModelDamaged).message


def test_what_is_no_importance_matrix_is_refused(half: Path, tiny_model: Path, tmp_path: Path) -> None:
    refused(job(half, tmp_path / "out.gguf", imatrix=half), UsageError)
    refused(job(half, tmp_path / "out.gguf", imatrix=tmp_path / "nowhere"), ModelNotFound)
    other = importance(tmp_path / "other", tiny_model)  # of a model with other rows
    assert "imatrix size" in refused(job(half, tmp_path / "out.gguf", imatrix=other), QuantizeFailed).message
