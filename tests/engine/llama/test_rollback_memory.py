"""Tests what rolling back costs: memory, as in llama.cpp's log, and how many snapshots are worth it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.models import fit
from cpuchat.models.gguf.header import read_model
from cpuchat.protocol.messages import LoadOptions
from tests.support.cores import ONE_CPU
from tests.support.tiny_gguf import Architecture, write_tiny_gguf

ARCHITECTURES: tuple[Architecture, ...] = ("llama", "mamba", "jamba", "lfm2", "nemotron_h", "qwen35", "gemma3")


@pytest.fixture(autouse=True)
def _cheap_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow large snapshots: the state of the test models is large compared with their weights."""
    monkeypatch.setattr(fit, "COPY_SHARE", 10.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rollback")
    return {a: write_tiny_gguf(folder / f"{a}-F32.gguf", arch=a, n_layer=3) for a in ("jamba", "nemotron_h", "qwen35")}


def _logged(lines: list[str], what: str) -> float:
    """Return the bytes in llama.cpp's `CPU <what> buffer size = 1.25 MiB`, which it rounds to 0.01."""
    sizes = [line.rpartition("=")[2].split()[0] for line in lines if f"{what} buffer size" in line]
    return sum(map(float, sizes)) * 2**20


@pytest.mark.parametrize(("arch", "n_ctx"), [*((arch, 256) for arch in ARCHITECTURES), ("gemma3", 1024)])  # its window
def test_memory_is_what_llama_cpp_says(
    arch: Architecture, n_ctx: int, load: Callable[..., Model], tmp_path: Path
) -> None:
    file = write_tiny_gguf(tmp_path / "wide-F32.gguf", arch=arch, n_layer=6, n_embd=256, n_ff=256)
    model = load(file, LoadOptions(n_ctx=n_ctx, n_batch=64, n_ubatch=64))
    lines, need = bindings.log.lines(), model.plan.need
    assert need.kv == pytest.approx(_logged(lines, "KV") + _logged(lines, "RS"), abs=0.02 * 2**20)
    compute, estimate = _logged(lines, "compute"), need.compute - fit.PROCESS_BYTES
    assert compute <= estimate <= 1.4 * compute


def test_snapshots_give_way_when_memory_is_short(files: dict[str, Path], abort: AbortFlag) -> None:
    options = LoadOptions(n_ctx=512, n_batch=64, n_ubatch=64)
    header = read_model(files["nemotron_h"])
    enough = fit.required_memory(header, options, 512, 32, 31).min_bytes
    least = fit.required_memory(header, options, 512, 32, 3).min_bytes
    for available, most in ((enough, 31), (enough - 1, 15), (least, 3)):
        model = Model.load(
            files["nemotron_h"], options, ONE_CPU, on_progress=lambda *_: None, abort=abort, available=available
        )
        try:
            assert model.plan.n_rs_seq == model.sequence.max_draft == most
        finally:
            model.free()
