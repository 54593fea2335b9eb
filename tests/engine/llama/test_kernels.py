"""Tests cpuchat's kernels: their products against exact ones, bit by bit over passes, and in models that they load.

They exist for x86 with AVX2; elsewhere llama.cpp's are used, and only that is tested. Here the widest instruction set
of this CPU computes; `tests/kernels` checks all.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from cpuchat.base import paths
from cpuchat.costs.model import ProductRate
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama import kernels as selected
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.llama.threads import ThreadPool
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.hardware.topology import Instructions, instructions
from cpuchat.models import kernels
from cpuchat.models.kernels import MeasuredProducts, ProductLog
from cpuchat.models.synthetic.model import SHAPES, write_model
from cpuchat.protocol.options import LoadMode
from tests.engine.conftest import Load
from tests.support.cores import ONE_CPU
from tests.support.engine_chat import OPTIONS
from tests.support.ggml_graph import ggml_graph

DEMO = paths.demo_dir() / "cpuchat-demo-8m-q4_k_m.gguf"
HERE = kernels.instructions_used(instructions())
needs_kernels = pytest.mark.skipif(not HERE, reason="cpuchat's kernels are for x86 with AVX2")
HALVES = {
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "Q4_1": (0, 2), "Q5_1": (0, 2),
    "MXFP4": (),
}  # fmt: skip
"""Where scales of a block are, by type; else it begins with one."""
LLAMA_CPP = msgspec.structs.replace(OPTIONS, kernels="llama.cpp")


def multiplied(kind: str, raw: np.ndarray, x: np.ndarray, n_threads: int = 1) -> np.ndarray:
    """Return the products of quantized rows with float rows."""
    with ggml_graph() as graph:
        product = graph.product(graph.weights(kind, raw, x.shape[1]), graph.floats(x))
        graph.compute(product, n_threads)
        return graph.values(product, (len(x), len(raw)))


def rows_of_blocks(
    rng: np.random.Generator, kind: str, n_rows: int, n_values: int, scale: float | None = None
) -> np.ndarray:
    """Return random blocks: all bits of weights and scales; scales of a block are random too, or all `scale`."""
    values, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (n_rows, n_values // values, n_bytes), dtype=np.uint8)
    shape = raw.shape[:2]
    if kind == "MXFP4":
        raw[:, :, 0] = rng.integers(118, 123, shape) if scale is None else 127 + round(np.log2(scale))
    for at in HALVES.get(kind, (0,)):
        d = rng.standard_normal(shape) * 1e-2 if scale is None else np.full(shape, scale)
        raw[:, :, at : at + 2] = d.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(n_rows, -1)


def quantized(kind: str, x: np.ndarray) -> np.ndarray:
    """Return activations as 8 bits of each block would have them, as llama.cpp quantizes them."""
    blocks = x.reshape(len(x), -1, 256 if kind.endswith(("K", "XS")) else 32)
    top = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    rounded = np.rint(blocks * inverse).astype(np.float64) * (top / np.float32(127)).astype(np.float64)
    return rounded.reshape(len(x), -1)


def weights_of(kind: str, raw: np.ndarray) -> np.ndarray:
    return gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float64)


# Rows and columns: one row, rows that fill no group, and blocks of 32 that fill none of 256.
SIZES = ((1, 256), (16, 256), (33, 512), (8, 1536), (17, 32), (9, 896))


@needs_kernels
@pytest.mark.parametrize("kind", kernels.TYPES)
def test_products_are_those_of_the_dequantized_weights(kind: str) -> None:
    for n_rows, n_values in SIZES:
        if n_values % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
            continue
        rng = np.random.default_rng(n_rows * n_values)
        raw = rows_of_blocks(rng, kind, n_rows, n_values)
        x = (rng.standard_normal((5, n_values)) * np.array([[1], [1e-3], [1e4], [1], [0]])).astype(np.float32)
        weights, rounded = weights_of(kind, raw), quantized(kind, x)
        found = multiplied(kind, raw, x)
        scale = np.abs(rounded) @ np.abs(weights).T + 1e-30
        assert (np.abs(found - rounded @ weights.T) / scale).max() < 1e-5, (n_rows, n_values)
        # Rounding is half a step of 1 / 127 of the greatest at most, and its signs are random.
        off = np.abs(found - x.astype(np.float64) @ weights.T)
        step = np.abs(x).max(-1, keepdims=True) / 254
        assert (off <= 4 * step * np.linalg.norm(weights, axis=1) + 1e-30).all(), (n_rows, n_values)


@needs_kernels
@pytest.mark.parametrize("kind", kernels.TYPES)
@pytest.mark.parametrize("size", [2.0**-24, 6e4])
def test_extreme_scales_and_activations_give_numbers(kind: str, size: float) -> None:
    rng = np.random.default_rng(3)
    raw = rows_of_blocks(rng, kind, 8, 512, size)
    x = (rng.choice([-1.0, 1.0], (4, 512)) * np.array([[1e-38], [1e-20], [1.0], [1e20]])).astype(np.float32)
    weights, rounded = weights_of(kind, raw), quantized(kind, x[1:])
    found = multiplied(kind, raw, x)
    assert np.isfinite(found).all()
    scale = np.abs(rounded) @ np.abs(weights).T + 1e-30
    assert (np.abs(found[1:] - rounded @ weights.T) / scale).max() < 1e-5


@needs_kernels
def test_exponents_of_mxfp4_are_exact() -> None:
    raw = np.full((248, 17), 0x22, np.uint8)  # values of 1
    raw[:, 0] = np.arange(248)
    x = np.zeros((1, 32), np.float32)
    x[0, 5] = 127
    found = multiplied("MXFP4", raw, x)[0]
    assert np.array_equal(found, (127 * 2.0 ** (np.arange(248) - 127)).astype(np.float32))


@needs_kernels
@pytest.mark.parametrize("kind", kernels.TYPES)
def test_a_token_has_the_same_bits_in_every_pass_with_any_number_of_threads(kind: str) -> None:
    rng = np.random.default_rng(7)
    raw = rows_of_blocks(rng, kind, 43, 768)
    x = rng.standard_normal((64, 768)).astype(np.float32)
    alone = np.concatenate([multiplied(kind, raw, x[i : i + 1]) for i in range(64)])
    for n in (1, 2, 3, 5, 8, 13, 33, 64):
        together = multiplied(kind, raw, x[:n], 1 + n % 4)
        assert np.array_equal(together.view(np.uint32), alone[:n].view(np.uint32)), n


@needs_kernels
def test_activations_may_lie_apart() -> None:
    rng = np.random.default_rng(8)
    raw, x = rows_of_blocks(rng, "Q4_K", 20, 256), rng.standard_normal((5, 600)).astype(np.float32)
    with ggml_graph() as graph:
        view = graph.columns(graph.floats(x), x.shape, 44, 256)
        product = graph.product(graph.weights("Q4_K", raw, 256), view)
        graph.compute(product)
        assert np.array_equal(graph.values(product, (5, 20)), multiplied("Q4_K", raw, x[:, 44:300]))


@needs_kernels
def test_rotations_are_left_to_the_transform_of_llama_cpp() -> None:
    # A quantized cache has them. The transform takes no matrix; a product with this one would be zero.
    raw = rows_of_blocks(np.random.default_rng(1), "Q8_0", 64, 64)
    with ggml_graph() as graph:
        product = graph.product(graph.weights("Q8_0", raw, 64), graph.floats(np.ones((3, 64))))
        rotated = graph.product(graph.floats(np.zeros((64, 64))), product, is_rotation=True)
        graph.compute(rotated)
        before, after = graph.values(product, (3, 64)), graph.values(rotated, (3, 64))
    assert np.linalg.norm(after) == pytest.approx(np.linalg.norm(before), rel=1e-5)


def of_cpuchat(model: Model) -> set[str]:
    """Return the types of weights that cpuchat's kernels multiply."""
    return {one.type.upper() for one in model.info.evidence.weights if one.is_of_cpuchat}


def logits(model: Model, tokens: list[int], widths: list[int]) -> np.ndarray:
    """Return the last logits after `tokens`, evaluated in passes of `widths`."""
    model.sequence.clear()
    for width in widths:
        model.sequence.extend(tokens[:width], n_outputs=1)
        tokens = tokens[width:]
    return model.sequence.logits(-1).copy()


@needs_kernels
def test_a_model_computes_with_them_and_llama_cpp_s_again_afterwards(load: Load) -> None:
    tokens = list(range(300, 324))
    ours, theirs = load(DEMO), load(DEMO, LLAMA_CPP)
    assert of_cpuchat(ours) == {"Q4_K", "Q6_K"} and not of_cpuchat(theirs)
    found = logits(ours, tokens, [24])
    assert np.array_equal(found, logits(ours, tokens, [1] * 24))
    expected = logits(theirs, tokens, [24])
    assert np.abs(found - expected).max() < 0.05 * np.ptp(expected)
    assert found.argmax() == expected.argmax()


LONG = msgspec.structs.replace(OPTIONS, n_ctx=1024, n_batch=512, n_ubatch=512)
TEXT = [40 + i * 37 % 400 for i in range(632)]


@needs_kernels
def test_drafts_behind_a_long_text_change_no_bit(load: Load) -> None:
    # llama.cpp's attention of one token is computed in parts, one for each thread, from 512 cells of the cache on.
    model = load(DEMO, LONG, threads=own_cpus()[:2])
    found = logits(model, TEXT, [512, 88, *[1] * 32])
    assert np.array_equal(found, logits(model, TEXT, [512, 88, 3, 29]))
    assert np.array_equal(found, logits(model, TEXT, [512, 88, 32]))
    assert np.array_equal(found, logits(model, TEXT, [300, 332]))


@needs_kernels
def test_answers_beside_each_other_change_no_bit(load: Load) -> None:
    # Needs a library whose attention covers several sequences (`make setup` builds it).
    model = load(DEMO, msgspec.structs.replace(LONG, parallel=3))
    passes = model.passes
    lanes = list(zip(model.lanes, (TEXT[:600], TEXT[9:79], TEXT[3:8]), strict=True))

    def write(lane: Sequence, text: list[int]) -> list[np.ndarray]:
        for at in range(0, len(text), 512):
            lane.extend(text[at : at + 512], n_outputs=1)
        rows = [lane.logits(len(text) % 512 - 1).copy()]
        for token in TEXT[:20]:
            rows.append(lane.step(token).copy())
        lane.release()
        return rows

    alone = [write(lane, text) for lane, text in lanes]
    for lane, _ in lanes:
        lane.clear()
        passes.begin_beside()
    with ThreadPoolExecutor(len(lanes)) as threads:
        written = [threads.submit(write, lane, text) for lane, text in lanes]
        for one in written:
            one.add_done_callback(lambda _: passes.end_beside())
        passes.run_beside()
    for before, after in zip(alone, written, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(before, after.result(), strict=True))


@needs_kernels
@pytest.mark.parametrize("name", ["27b-gemma3", "0.5b"])
def test_attention_is_that_of_llama_cpp(name: str, tmp_path: Path, load: Load) -> None:
    # Windows and heads of 32; 7 heads of 48 for each of the cache, of which AVX-512 takes 32 values.
    of_two = {"n_embd": 224, "n_head": 4, "n_head_kv": 2, "head": 32}
    heads = of_two if name == "27b-gemma3" else {"n_embd": 672, "n_head": 14, "head": 48}
    shape = msgspec.structs.replace(
        SHAPES[name], name="tiny", n_layer=6, n_ff=256, n_vocab=512, **heads,
        window=min(SHAPES[name].window, 96),
    )  # fmt: skip
    file = write_model(tmp_path / "tiny.gguf", shape, "Q8_0")
    # An F32 cache is left to llama.cpp.
    exact = load(file, msgspec.structs.replace(LONG, type_k="f32", type_v="f32"))
    for widths in ([512, 88, *[1] * 32], [512, 88, 32], [20, 30]):
        expected = logits(exact, TEXT, widths)
        found = logits(load(file, LONG), TEXT, widths)
        assert np.abs(found - expected).max() < 0.01 * np.ptp(expected)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q4_K_M", "MXFP4", "IQ4_NL"])
def test_experts_compute_with_them(kind: str, tmp_path: Path, load: Load) -> None:
    shape = msgspec.structs.replace(
        SHAPES["30b-a3b"], name="tiny-moe", n_layer=3, n_embd=512, n_head=2, n_head_kv=1, n_ff=256, n_vocab=512,
        head=128, n_expert=48, n_expert_used=6, n_ctx=1024,
    )  # fmt: skip
    file = write_model(tmp_path / "moe.gguf", shape, kind)
    tokens = list(range(40, 60))
    ours, theirs = load(file), load(file, LLAMA_CPP)
    assert of_cpuchat(ours)
    found, expected = logits(ours, tokens, [20]), logits(theirs, tokens, [20])
    assert np.array_equal(found, logits(ours, tokens, [1, 7, 12]))
    assert np.array_equal(found, logits(ours, tokens, [1] * 20))  # the router's F32 products, too
    assert np.abs(found - expected).max() < 0.05 * np.ptp(expected)


@needs_kernels
def test_types_and_shapes_that_are_not_covered_stay_with_llama_cpp(tmp_path: Path, load: Load) -> None:
    shape = msgspec.structs.replace(SHAPES["tiny"], name="tiny-mixed", n_ff=272)
    file = write_model(tmp_path / "mixed.gguf", shape, "Q3_K")  # rows of 272 values are F16
    tokens = list(range(40, 60))
    ours, theirs = load(file), load(file, LLAMA_CPP)
    assert "Q3_K" in of_cpuchat(ours) and ours.info.evidence is not None
    assert "f16" in {one.type for one in ours.info.evidence.weights if one.buffer != "CPU_CPUCHAT"}
    found, expected = logits(ours, tokens, [20]), logits(theirs, tokens, [20])
    assert np.abs(found - expected).max() < 0.05 * np.ptp(expected)


@pytest.fixture(scope="module", params=["Q4_K_M", "Q8_0"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a matrix that several threads lay out."""
    shape = msgspec.structs.replace(SHAPES["tiny"], n_layer=1, n_embd=256, n_ff=512, n_vocab=16_384)
    return write_model(tmp_path_factory.mktemp("kernels") / "large.gguf", shape, request.param)


@needs_kernels
def test_any_number_of_threads_lays_out_and_computes_the_same(
    large: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(300, 320))
    alone = logits(load(large), tokens, [20])
    assert np.array_equal(alone, logits(load(large, threads=own_cpus()[:3]), tokens, [20]))
    prepare = selected.prepare
    # CPUs that went away after they were chosen, and more CPUs than threads.
    for cpus, n_threads in (((4000, 4001), 2), (own_cpus(), 1), ((*own_cpus(), 4000), 3)):
        monkeypatch.setattr(selected, "prepare", lambda *_, cpus=cpus, n=n_threads: prepare(cpus, n, False))
        assert np.array_equal(alone, logits(load(large), tokens, [20]))


def in_memory(file: Path) -> int:
    """Return the bytes of the file that this process has mapped and in memory."""
    found, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if "-" in name:
            is_file = words[-1] == str(file)
        elif is_file and name == "Rss:":
            found += int(words[0]) << 10
    return found


@needs_kernels
@pytest.mark.parametrize("load_mode", ["mmap", "read"])
def test_weights_take_the_memory_that_is_told(large: Path, load: Load, load_mode: LoadMode) -> None:
    options = msgspec.structs.replace(OPTIONS, load_mode=load_mode)
    model = load(large, options)
    need = model.plan.need
    sizes = re.findall(r"CPU_CPUCHAT model buffer size = +([0-9.]+) MiB", "\n".join(bindings.log.lines()))
    assert need.repack / (1 << 20) == pytest.approx(sum(map(float, sizes)), abs=0.01)
    assert need.repack >= model.header.size - need.weights > 0.5 * model.header.size
    assert need.reclaimable == 0
    assert in_memory(large) <= need.weights + (1 << 18)  # and what the header and pages at the ends take


def test_without_the_library_llama_cpp_computes(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    selected.select(())
    monkeypatch.setattr(bindings, "kernels_library", None)
    model = load(DEMO)
    assert not of_cpuchat(model)
    told = [note for note in model.info.notes if "kernels were built for another engine" in note]
    assert len(told) == bool(HERE)  # the file is there
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert selected.refusal() == ""


@needs_kernels
def test_a_library_of_another_engine_cpuchat_or_cpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bindings._open_kernels() is not None
    with monkeypatch.context() as other:
        other.setattr(bindings, "ggml_version", lambda: b"0.0.1")
        assert bindings._open_kernels() is None
    with monkeypatch.context() as other:
        other.setattr(kernels, "TYPES", kernels.TYPES[:-1])
        assert bindings._open_kernels() is None
    monkeypatch.setattr(bindings, "engine_cpu", lambda module: Instructions(frozenset({"AVX"})))
    assert bindings._open_kernels() is None


def products(ours: float, *, difference: float = 0.0, kind: str = "Q6_K") -> MeasuredProducts:
    """Return a measurement just now in which cpuchat's kernels are `ours` times as fast."""
    return MeasuredProducts(
        cpuchat=ProductRate(kind, ((1.0, ours * 1e10),)),
        llama_cpp=ProductRate(kind, ((1.0, 1e10),)),
        difference=difference,
        made=time.time(),
    )


@needs_kernels
@pytest.mark.parametrize("kind", ["Q4_K", "MXFP4"])
def test_both_kernels_compute_the_same_and_have_rates(kind: str) -> None:
    pool = ThreadPool(ONE_CPU, 0)
    try:
        found = selected.measure(kind, pool, (1, 5), seconds=0.0)
    finally:
        pool.free()
    assert not found.is_wrong
    assert [n for n, _ in found.cpuchat.points] == [1.0, 5.0]
    assert all(rate > 0 for side in (found.cpuchat, found.llama_cpp) for _, rate in side.points)


@needs_kernels
def test_a_type_that_was_measured_to_be_slower_stays_with_llama_cpp(load: Load) -> None:
    ProductLog(ONE_CPU).put({"Q6_K": products(0.9)})
    assert of_cpuchat(load(DEMO)) == {"Q4_K"}


@needs_kernels
def test_a_type_whose_results_differ_stays_with_llama_cpp_and_is_told(load: Load) -> None:
    ProductLog(ONE_CPU).put({"Q4_K": products(2.0, difference=0.2, kind="Q4_K")})
    model = load(DEMO)
    assert of_cpuchat(model) == {"Q6_K"}
    assert any("Q4_K weights differ from llama.cpp's" in note for note in model.info.notes)
