"""Tests loading: what works, and what is refused with which words."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from cpuchat.base.errors import DoesNotFit, Interrupted, ModelDamaged, ModelUnsupported, UsageError
from cpuchat.engine.llama import model as engine_options
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model, read_ahead
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.hardware import memory
from cpuchat.hardware.numa.mempolicy import Policy
from cpuchat.hardware.numa.residency import evict, missing_ranges
from cpuchat.models.gguf.header import read_model
from cpuchat.protocol.messages import LoadOptions
from tests.engine.conftest import OPTIONS, Load
from tests.support.cores import ONE_CPU
from tests.support.edited_gguf import sentences
from tests.support.tiny_gguf import finish, write_tiny_gguf


def test_info(load: Load, tiny_model: Path) -> None:
    info = load(tiny_model).info
    assert (info.name, info.architecture, info.quantization) == ("tiny", "llama", "F32")
    assert (info.n_ctx, info.n_ctx_train, info.n_layer) == (512, 4096, 2)
    assert info.n_threads == 1 == len(info.cpus)
    assert info.has_template and info.notes == ()
    assert info.n_vocab == 256 + 11 + 5
    assert info.kv_size == 512 * 2 * 2 * 64 * 2  # tokens x layers x (K and V) x values x f16
    assert info.size < tiny_model.stat().st_size
    assert len(info.fingerprint) == 32 and info.load_ms > 0


@pytest.mark.parametrize("mode", ["mmap", "read"])
def test_progress_moves_and_arrives(load: Load, tiny_model: Path, mode: str) -> None:
    seen: list[tuple[str, int, int]] = []
    load(tiny_model, msgspec.structs.replace(OPTIONS, load_mode=mode), on_progress=lambda *event: seen.append(event))
    size = tiny_model.stat().st_size
    assert seen[-1] == ("warming", 0, 1)
    assert {total for _, _, total in seen[:-1]} == {size}
    phases = ["reading", "preparing"] if mode == "mmap" else ["reading"]
    assert list(dict.fromkeys(phase for phase, _, _ in seen[:-1])) == phases
    for phase in phases:
        done = [d for p, d, _ in seen if p == phase]
        assert done == sorted(done) and done[-1] == size


@pytest.mark.parametrize(
    ("mode", "at"), [("mmap", "start"), ("mmap", "reading"), ("mmap", "preparing"), ("read", "reading")]
)
def test_load_can_be_cancelled(load: Load, tiny_model: Path, abort: AbortFlag, mode: str, at: str) -> None:
    if at == "start":
        abort.set()

    def progress(phase: str, done: int, total: int) -> None:
        if phase == at:
            abort.set()

    with pytest.raises(Interrupted):
        load(tiny_model, msgspec.structs.replace(OPTIONS, load_mode=mode), on_progress=progress)
    abort.clear()
    load(tiny_model)


def bytes_read() -> int:
    """Return the bytes that this process read through system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is in the page cache")
def test_only_what_is_not_in_memory_is_read_before_mapping(load: Load, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", n_embd=256, n_layer=4, n_ff=1024)
    size = path.stat().st_size
    before = bytes_read()
    load(path).free()  # pages that are mapped stay
    assert bytes_read() - before < size // 4
    if not evict(path):
        pytest.skip("this file system keeps every file in memory")
    seen: list[tuple[str, int, int]] = []
    before = bytes_read()
    load(path, on_progress=lambda *event: seen.append(event))
    assert bytes_read() - before > size * 3 // 4
    done = [d for phase, d, _ in seen if phase == "reading"]
    assert done[0] < size // 4 and done == sorted(done) and done[-1] == size


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is in the page cache")
def test_a_reader_per_node_reads_its_share_on_its_cpus(tmp_path: Path, abort: AbortFlag) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf", n_embd=512, n_layer=8, n_ff=2048)
    if not evict(path):
        pytest.skip("this file system keeps every file in memory")
    here = os.sched_getaffinity(0)
    seen: list[tuple[str, int, int]] = []
    assert read_ahead(read_model(path), lambda *event: seen.append(event), abort, ((min(here),), (max(here),)))
    assert os.sched_getaffinity(0) == here and not missing_ranges(path)
    assert seen[-1] == ("reading", path.stat().st_size, path.stat().st_size)
    assert not read_ahead(read_model(path), lambda *_: None, abort), "everything is in memory"
    abort.set()
    with pytest.raises(Aborted):
        read_ahead(read_model(path), lambda *_: None, abort)


def test_affinity_is_restored(tiny_model: Path, abort: AbortFlag) -> None:
    before = os.sched_getaffinity(0)
    model = Model.load(tiny_model, OPTIONS, ONE_CPU, on_progress=lambda *_: None, abort=abort)
    assert os.sched_getaffinity(0) <= before
    model.free()
    model.free()
    assert os.sched_getaffinity(0) == before


def test_threads_that_roam_may_use_any_of_the_cpus(tiny_model: Path, abort: AbortFlag) -> None:
    before = os.sched_getaffinity(0)
    cpus = tuple(sorted(before)[:2])
    model = Model.load(tiny_model, OPTIONS, cpus[:1], on_progress=lambda *_: None, abort=abort, roams=cpus)
    model.sequence.step(65)
    assert (os.sched_getaffinity(0), model.info.n_threads) == ({*cpus}, 1)
    model.free()
    assert os.sched_getaffinity(0) == before


def test_longer_context_than_trained_is_noted(load: Load, tiny_model: Path) -> None:
    info = load(tiny_model, msgspec.structs.replace(OPTIONS, n_ctx=8192)).info
    assert info.n_ctx == 8192
    assert "4,096" in info.notes[0]
    assert load(tiny_model, LoadOptions()).info.n_ctx == 4096


@pytest.mark.parametrize(
    "changes",
    [
        {"type_k": "q8_0", "flash_attn": "on"},
        {"type_k": "bf16", "type_v": "bf16", "flash_attn": "off", "poll": 100},
        {"use_repack": False, "load_mode": "read", "flash_attn": "on"},
        {"n_batch": 4096, "n_ubatch": 4096, "mlock": True},
        {"mlock": True, "load_mode": "read"},
    ],
)
def test_options_that_work(load: Load, tmp_path: Path, changes: dict[str, object]) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", n_embd=128)  # heads of 32, a block of q8_0
    assert np.isfinite(load(path, msgspec.structs.replace(OPTIONS, **changes)).sequence.step(65)).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_ctx": 255}, "context size must be"),
        ({"type_v": "q8_0", "flash_attn": "off"}, "needs flash attention"),
        ({"type_k": "q8_0"}, "head size of 16"),
    ],
)
def test_options_that_are_refused(load: Load, tiny_model: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load(tiny_model, msgspec.structs.replace(OPTIONS, **changes))


def test_lock_beyond_the_limit_is_refused(load: Load, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr(engine_options, "may_lock_all", lambda: False)
    with pytest.raises(UsageError, match="Memory locking"):
        load(tiny_model, msgspec.structs.replace(OPTIONS, mlock=True))


def test_context_too_large_for_memory(load: Load, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", n_embd=1024, n_layer=4, n_ff=64, n_ctx_train=1 << 24)
    with pytest.raises(DoesNotFit, match="KV cache") as caught:
        load(path, LoadOptions(n_ctx=1 << 24))
    assert "--ctx" in caught.value.hint


@pytest.mark.parametrize("share", [0.0, 0.05, 0.99])
def test_truncated_file(load: Load, tiny_model: Path, tmp_path: Path, share: float) -> None:
    data = tiny_model.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelDamaged, match=r"cut\.gguf"):
        load(path)


@pytest.mark.parametrize(
    ("arch", "kind", "words"),
    [("clip", "mmproj", "multimodal projector"), ("llama", "adapter", "adapter"), ("llama", "imatrix", "importance")],
)
def test_what_goes_with_a_model_is_none(load: Load, tmp_path: Path, arch: str, kind: str, words: str) -> None:
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(kind)
    writer.add_tensor("v.patch_embd.weight", np.zeros((8, 8), np.float32))
    finish(writer)
    with pytest.raises(ModelUnsupported, match=f"part.gguf is an? .*{words}.*, not a language model"):
        load(path)


def test_a_vocabulary_that_cannot_write_every_text_is_refused(load: Load, tiny_model: Path, tmp_path: Path) -> None:
    """llama.cpp would end the process at the first character that it has no token for."""
    words = {"tokenizer.ggml.tokens": [f"t{number}" for number in range(272)]}
    with pytest.raises(ModelUnsupported, match="cannot write every text"):
        load(sentences(tiny_model, tmp_path / "words.gguf", words))


GIB = 1 << 30


@pytest.mark.parametrize(
    ("policy", "allowed", "expected"),
    [
        (Policy("bind", (1,)), (0, 1), 3),  # more is killed, whatever node 0 has
        (Policy("preferred", (1,)), (0, 1), 12),
        (Policy("local"), (1,), 3),  # a container on one node
        (None, (), 12),
    ],
)
def test_what_a_model_may_take_of_the_memory_of_nodes(
    monkeypatch: pytest.MonkeyPatch, policy: Policy | None, allowed: tuple[int, ...], expected: int
) -> None:
    monkeypatch.setattr(engine_options, "current", lambda: policy)
    monkeypatch.setattr(engine_options, "allowed_nodes", lambda: allowed)
    monkeypatch.setattr(memory, "available_bytes", lambda root: 12 * GIB)
    monkeypatch.setattr(memory, "available_on", lambda nodes, root: 3 * GIB if tuple(nodes) == (1,) else None)
    assert engine_options.available_for_model() == expected * GIB
