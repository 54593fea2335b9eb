"""Tests memory arithmetic against llama.cpp's own log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import DoesNotFit
from cpuchat.hardware.topology import Instructions
from cpuchat.models import fit
from cpuchat.models.gguf.header import GGUFHeader, read_header
from cpuchat.models.gguf.parse import TensorInfo
from cpuchat.models.synthetic.model import SHAPES, write_model
from cpuchat.models.synthetic.model import header_of as header_of_shape
from cpuchat.protocol.messages import AUTO_PARALLEL, LoadOptions
from tests.models.llama import Llama
from tests.support.shapes import TINY_LLAMA, TINY_MOE

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fit")
    half = msgspec.structs.replace(SHAPES["0.5b"], n_layer=2, n_vocab=20_000)
    return {
        "tiny": write_model(folder / "tiny.gguf", "tiny", "Q8_0"),
        "llama": write_model(folder / "llama.gguf", TINY_LLAMA, "Q4_K_M"),
        "moe": write_model(folder / "moe.gguf", TINY_MOE, "Q4_K_M"),
        "half": write_model(folder / "half.gguf", half, "Q4_K_M"),
    }


def options_for(n_ubatch: int, flash: bool = True) -> LoadOptions:
    flash_attn = "auto" if flash else "off"
    return LoadOptions(n_ubatch=n_ubatch, n_batch=n_ubatch, flash_attn=flash_attn, kernels="llama.cpp")


def test_answers_at_once_are_counted_and_as_many_as_half_of_the_rest_holds_are_chosen() -> None:
    header = header_of_shape(SHAPES["0.5b"], "Q8_0")
    alone = fit.required_memory(header, LoadOptions(), 4096)
    three = fit.required_memory(header, LoadOptions(parallel=3), 4096)
    assert three.kv == 3 * alone.kv and "3 × 4,096 tokens" in three.breakdown()
    for spare, expected in ((0, 1), (2, 2), (4, 3), (100, AUTO_PARALLEL)):
        available = alone.min_bytes + spare * alone.kv
        need, _ = fit.plan_memory(header, LoadOptions(n_ctx=4096, parallel=0), available)
        assert need.parallel == expected
        assert need.min_bytes <= available


@pytest.mark.parametrize(
    ("name", "n_ctx", "n_ubatch", "flash"),
    [("tiny", 512, 512, True), ("llama", 4096, 128, True), ("moe", 2048, 256, False), ("half", 2048, 256, True)],
)
def test_sizes_agree_with_llama_cpp(models: dict[str, Path], name: str, n_ctx: int, n_ubatch: int, flash: bool) -> None:
    header = read_header(models[name])
    need = fit.required_memory(header, options_for(n_ubatch, flash), n_ctx, n_outputs=1)
    with Llama(models[name], n_ctx=n_ctx, n_ubatch=n_ubatch, flash_attn=-1 if flash else 0) as llama:
        assert need.kv / MIB == pytest.approx(llama.mebibytes("KV buffer size"), abs=0.01)
        compute = llama.mebibytes("compute buffer size") + llama.mebibytes("output buffer size")
        assert compute <= (need.compute - fit.PROCESS_BYTES) / MIB + 0.1
        assert (need.compute - fit.PROCESS_BYTES) / MIB <= compute * 1.4 + 1
        assert need.weights / MIB >= llama.mebibytes("CPU(?:_Mapped)? model buffer size") - 0.1
        repacked = sum(llama.mebibytes(f"{name} model buffer size") for name in ("CPU_REPACK", "AMX"))
        assert repacked == 0 or need.repack / MIB == pytest.approx(repacked, abs=0.1)


def header_of(metadata: Mapping[str, object], tensors: dict[str, tuple[int, ...]]) -> GGUFHeader:
    listed = [TensorInfo(name, shape, "F16", 0, 2 * shape[0] * shape[1]) for name, shape in tensors.items()]
    return GGUFHeader(3, {"general.architecture": "a", **metadata}, listed, 0, 0, 32, Path("x.gguf"))


def test_recurrent_layers_have_a_state_and_no_kv() -> None:
    metadata = {"a.block_count": 2, "a.attention.head_count": 2, "a.embedding_length": 64,
                "a.ssm.inner_size": 128, "a.ssm.state_size": 16, "a.ssm.conv_kernel": 4}  # fmt: skip
    header = header_of(metadata, {"blk.0.ssm_in.weight": (64, 64), "blk.1.attn_k.weight": (64, 64),
                                  "blk.1.attn_v.weight": (64, 64)})  # fmt: skip
    state = 4 * (3 * 128 + 16 * 128)
    assert fit.kv_bytes(header, 256) == state + 256 * 2 * 128
    assert fit.kv_bytes(header, 512) == state + 512 * 2 * 128


def test_repacked_weights_count_once_unless_locked(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "engine_cpu", lambda _: Instructions(frozenset({"AVX2"})))
    header = read_header(models["llama"])
    plain = fit.required_memory(header, LoadOptions(use_repack=False), 512)
    repacked = fit.required_memory(header, LoadOptions(), 512)
    locked = fit.required_memory(header, LoadOptions(mlock=True), 512)
    assert repacked.repack > 0 == plain.repack
    assert repacked.min_bytes == plain.min_bytes
    assert locked.min_bytes == repacked.total == plain.total + repacked.repack


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_what_cpuchat_lays_out_exists_once_unless_it_is_locked(
    models: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "engine_cpu", lambda _: Instructions(frozenset({"AVX2", "FMA", "F16C"})))
    monkeypatch.setattr(fit, "instructions_used", lambda _: "AVX-512 VNNI")
    monkeypatch.setattr(fit, "_n_cpus", lambda: 0)
    header = read_header(models[name])
    plain = fit.required_memory(header, LoadOptions(use_repack=False), 512)
    ours = fit.required_memory(header, LoadOptions(kernels="auto"), 512)
    locked = fit.required_memory(header, LoadOptions(kernels="auto", mlock=True), 512)
    # Groups of 16 rows that are filled up, and a buffer of whole huge pages.
    assert 0 <= ours.total - plain.total < (4 << 20)
    assert ours.min_bytes == ours.total and ours.repack % (2 << 20) == 0
    assert locked.min_bytes == locked.total == plain.total + ours.repack


def test_layers_with_a_window_keep_no_more_than_it_and_one_batch() -> None:
    header = header_of_shape("27b-gemma3", "Q4_K_M")  # 52 of 62 layers attend to 1024 tokens
    row = 2 * 2 * 16 * 128
    assert fit.kv_bytes(header, 131_072) == row * (10 * 131_072 + 52 * (1024 + 512))
    assert fit.kv_bytes(header, 131_072, n_ubatch=600) == row * (10 * 131_072 + 52 * 1792)  # padded to 256
    assert fit.kv_bytes(header, 512) == row * 62 * 512
    assert fit.kv_growth(header, LoadOptions(n_ubatch=256)) == (10 * row, 52 * 1280 * row)
    available = fit.required_memory(header, LoadOptions(), 65_536).min_bytes
    assert fit.largest_context(header, LoadOptions(), available) == 65_536


def test_the_largest_context_is_the_largest(models: dict[str, Path]) -> None:
    header, options = read_header(models["half"]), LoadOptions()
    available = fit.required_memory(header, options, 10_000).min_bytes
    largest = fit.largest_context(header, options, available)
    assert largest % 256 == 0
    assert fit.required_memory(header, options, largest).min_bytes <= available
    assert fit.required_memory(header, options, largest + 256).min_bytes > available
    assert fit.largest_context(header, options, 0) == 0
    assert fit.largest_context(header, options, 1 << 50) == header.n_ctx_train
    assert fit.choose_context(header, LoadOptions(n_ctx=777), 0) == 777
    assert fit.choose_context(header, options, 1 << 50) == 8192
    assert fit.choose_context(header, options, available - (1 << 20)) <= largest
    assert fit.choose_context(header, options, 0) == 256


def test_a_refusal_holds_the_sum_and_a_way_out(models: dict[str, Path]) -> None:
    header, options = read_header(models["half"]), LoadOptions()
    need = fit.required_memory(header, options, 1_000_000)
    fit.check_fit(need, need.min_bytes, header, options)
    available = fit.required_memory(header, options, 30_000).min_bytes
    with pytest.raises(DoesNotFit) as caught:
        fit.check_fit(need, available, header, options)
    largest = fit.largest_context(header, options, available)
    assert "2.3 GB = weights 0.04 + " in caught.value.message
    assert "KV cache 1.0 (1,000,000 tokens)" in caught.value.message
    assert f"{fit.gigabytes(available)} GB are available" in caught.value.message
    assert f"--ctx {largest} would fit" in caught.value.hint
    assert "q8_0 KV cache" in caught.value.hint
    with pytest.raises(DoesNotFit, match="smaller model or quantization"):
        fit.check_fit(need, 1_000_000, header, options)
    with pytest.raises(DoesNotFit, match="smaller --ctx"):
        fit.check_fit(need, need.min_bytes - 1)
