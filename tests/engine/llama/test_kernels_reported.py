"""Tests what people reported of other programs with kernels, layouts and loads of their own (docs/reliability.md), in
ggml's graphs, with models of several architectures, and where the system refuses threads or memory.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest

from cpuchat.base.errors import ModelDamaged
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama import kernels as selected
from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.engine.llama.model import may_lock_all
from cpuchat.models import kernels
from cpuchat.models.gguf.header import read_model
from cpuchat.models.kernels import MeasuredProducts, ProductLog
from cpuchat.models.synthetic.model import SHAPES, write_model
from cpuchat.protocol.options import LoadMode
from tests.engine.conftest import Load
from tests.engine.llama.test_kernels import (
    DEMO,
    HALVES,
    HERE,
    LLAMA_CPP,
    logits,
    multiplied,
    of_cpuchat,
    rows_of_blocks,
)
from tests.engine.llama.test_kernels import products as measured
from tests.support.cores import ONE_CPU, no_stacks
from tests.support.engine_chat import OPTIONS
from tests.support.ggml_graph import ggml_graph
from tests.support.shapes import shape_of
from tests.support.tiny_gguf import Architecture, write_tiny_gguf

pytestmark = [pytest.mark.full, pytest.mark.skipif(not HERE, reason="cpuchat's kernels are for x86 with AVX2")]
WIDEST_FIRST = ("AVX-512 VNNI, AMX", "AVX-512 VNNI", "AVX-VNNI", "AVX2")


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


# Products


def test_activations_of_several_batches_are_multiplied_whole() -> None:
    rng, kind = np.random.default_rng(1), "Q4_K"
    raw = rows_of_blocks(rng, kind, 40, 512)
    x = rng.standard_normal((3, 5, 512)).astype(np.float32)
    with ggml_graph() as graph:
        product = graph.product(graph.weights(kind, raw, 512), graph.floats(x))
        graph.compute(product, 2)
        found = graph.values(product, (3, 5, 40))
    assert np.array_equal(bits(found), bits(multiplied(kind, raw, x.reshape(15, 512)).reshape(3, 5, 40)))


@pytest.mark.parametrize(("n_tokens", "n_rows"), [(1, 1013), (3, 24), (40, 16), (1, 1)])
def test_far_more_threads_than_rows_compute_each_row_once(n_tokens: int, n_rows: int) -> None:
    rng = np.random.default_rng(n_rows)
    raw = rows_of_blocks(rng, "Q4_K", n_rows, 256)
    x = rng.standard_normal((n_tokens, 256)).astype(np.float32)
    assert np.array_equal(bits(multiplied("Q4_K", raw, x, 61)), bits(multiplied("Q4_K", raw, x)))


@pytest.mark.parametrize("shares_input", [True, False])
def test_an_expert_that_a_token_names_twice_computes_both(shares_input: bool) -> None:
    rng = np.random.default_rng(2)
    raw = np.stack([rows_of_blocks(rng, "Q4_K", 24, 256) for _ in range(4)])
    experts = np.array([[3, 3, 0], [3, 3, 3], [1, 0, 1], [3, 2, 3]] * 5)
    x = rng.standard_normal((len(experts), 1 if shares_input else 3, 256)).astype(np.float32)
    with ggml_graph() as graph:
        product = graph.product_of_experts(graph.weights("Q4_K", raw, 256), graph.floats(x), experts)
        graph.compute(product, 3)
        found = graph.values(product, (*experts.shape, 24))
    for token, row in enumerate(experts):
        for slot, expert in enumerate(row):
            alone = x[token, 0 if shares_input else slot][None]
            assert np.array_equal(bits(found[token, slot]), bits(multiplied("Q4_K", raw[expert], alone)[0]))


@pytest.mark.parametrize("kind", kernels.TYPES)
def test_a_token_that_is_no_number_has_results_that_are_none_and_leaves_others_alone(kind: str) -> None:
    rng = np.random.default_rng(3)
    raw = rows_of_blocks(rng, kind, 24, 512)
    for n_tokens in (1, 3, 8, 40):
        x = rng.standard_normal((n_tokens, 512)).astype(np.float32)
        expected = multiplied(kind, raw, x)
        for at, wrong in ((0, np.nan), (9, np.inf), (255, -np.inf), (300, np.nan)):
            x[n_tokens // 2] = 0.5
            x[n_tokens // 2, at] = wrong
            found = multiplied(kind, raw, x)
            assert not np.isfinite(found[n_tokens // 2]).any()
            others = np.arange(n_tokens) != n_tokens // 2
            assert np.array_equal(bits(found[others]), bits(expected[others]))


# Models


def quantized(source: Path, kind: str) -> Path:
    """Return a model with as many of its matrices in a tensor type as llama.cpp quantizes."""
    to = source.with_name(f"{source.stem}-{kind}.gguf")
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.pure = {"Q8_0": 7, "Q4_0": 2, "Q4_K": 14}[kind], True
    assert llama.llama_model_quantize(bytes(source), bytes(to), ctypes.byref(params)) == 0
    return to


ARCHITECTURES: tuple[Architecture, ...] = (
    "llama", "mamba", "jamba", "lfm2", "nemotron_h", "qwen35", "gemma3", "deepseek2",
)  # fmt: skip


@pytest.mark.parametrize(("arch", "kind"), list(zip(ARCHITECTURES, ["Q4_K", "Q8_0"] * 4, strict=True)))
def test_every_architecture_computes_with_them(arch: Architecture, kind: str, tmp_path: Path, load: Load) -> None:
    n_layer = 4 if arch in ("qwen35", "deepseek2") else 2
    source = tmp_path / f"{arch}.gguf"
    file = quantized(write_tiny_gguf(source, arch=arch, gain=2.0, n_embd=256, n_ff=512, n_layer=n_layer), kind)
    tokens = list(range(40, 64))
    ours, theirs = load(file), load(file, LLAMA_CPP)
    assert kind in of_cpuchat(ours)
    found, expected = logits(ours, tokens, [24]), logits(theirs, tokens, [24])
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() < 0.1 * np.ptp(expected)


@pytest.mark.parametrize(("kind", "name"), [("Q8_0", "blk.0.attn_q"), ("Q4_K", "blk.0.ffn_down"), ("Q6_K", "output")])
def test_weights_that_are_no_numbers_are_found_at_the_load(kind: str, name: str, tmp_path: Path, load: Load) -> None:
    file = write_model(tmp_path / "nan.gguf", SHAPES["tiny"], kind)
    tensor = next(one for one in gguf.GGUFReader(file).tensors if one.name == f"{name}.weight")
    at, *_ = HALVES.get(tensor.tensor_type.name, (0,))  # of the scale of the first block
    with file.open("r+b") as stream:
        stream.seek(tensor.data_offset + at)
        stream.write(np.array(np.nan, np.float16).tobytes())
    with pytest.raises(ModelDamaged, match="NaN or infinite"):
        load(file)


# Loads


def run(code: str, *arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    root = Path(__file__).parents[3]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120, check=False, **more)


LOCK = """
import sys
from pathlib import Path
import msgspec
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.hardware.sysfs import own_cpus
from tests.support.engine_chat import OPTIONS

options = msgspec.structs.replace(OPTIONS, mlock=True, load_mode=sys.argv[2], kernels=sys.argv[3])
model = Model.load(Path(sys.argv[1]), options, own_cpus()[:1], on_progress=lambda *_: None, abort=AbortFlag())
locked = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmLck:"))
print(1024 * int(locked) / model.header.size, *(note for note in model.info.notes if "mlock" in note))
"""


@pytest.mark.skipif(not may_lock_all(), reason="this process may not lock as much")
@pytest.mark.parametrize(("load_mode", "used"), [("mmap", "auto"), ("read", "llama.cpp")])
def test_locked_weights_are_those_that_compute(load_mode: LoadMode, used: str) -> None:
    done = run(LOCK, DEMO, load_mode, used)
    share, *notes = done.stdout.split(maxsplit=1)
    assert float(share) >= 0.99 and not notes, done.stderr


LOAD = """
import sys
from pathlib import Path
from cpuchat.engine.llama import kernels
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.hardware.sysfs import own_cpus
from tests.support.engine_chat import OPTIONS

prepare = kernels.prepare
kernels.prepare = lambda cpus, n_threads, is_mapped: prepare((cpus[0], cpus[0], cpus[0]), 3, is_mapped)
model = Model.load(Path(sys.argv[1]), OPTIONS, own_cpus()[:1], on_progress=lambda *_: None, abort=AbortFlag())
print(sorted({one.buffer for one in model.info.evidence.weights}), float(model.sequence.step(65).sum()))
model.free()
"""
STACKS = """
import threading
threading.stack_size(1 << 20)
"""
"""Python's own threads start where others do not."""


def test_a_load_that_may_start_no_threads_lays_out_on_its_own(tmp_path: Path) -> None:
    shape = msgspec.structs.replace(SHAPES["tiny"], n_layer=1, n_embd=256, n_ff=512, n_vocab=16_384)
    file = write_model(tmp_path / "large.gguf", shape, "Q4_K_M")
    said = [run(STACKS + LOAD, file, preexec_fn=limit) for limit in (None, no_stacks)]
    assert [one.returncode for one in said] == [0, 0], said[1].stderr
    assert "CPU_CPUCHAT" in said[0].stdout
    assert said[0].stdout == said[1].stdout


SHORT = """
import resource, sys
from pathlib import Path
import msgspec
from cpuchat.base.errors import CpuchatError
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.hardware.sysfs import own_cpus
from tests.support.engine_chat import OPTIONS

file, options = Path(sys.argv[1]), msgspec.structs.replace(OPTIONS, load_mode=sys.argv[2])

def load():
    try:
        Model.load(file, options, own_cpus()[:1], on_progress=lambda *_: None, abort=AbortFlag()).free()
        print("loaded")
    except CpuchatError as error:
        print(error.code, error.message)

load()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[3]), resource.RLIM_INFINITY))
load()
"""


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose weights take most of what it needs."""
    return write_model(tmp_path_factory.mktemp("heavy") / "heavy.gguf", shape_of("0.5b", 1), "Q4_K_M")


@pytest.mark.parametrize(("load_mode", "refused"), [("mmap", "the file"), ("mmap", "the copy"), ("read", "the file")])
def test_weights_for_which_memory_is_refused_do_not_fit(load_mode: LoadMode, refused: str, heavy: Path) -> None:
    more = (40 << 20) + (heavy.stat().st_size if refused == "the copy" and load_mode == "mmap" else 0)
    done = run(STACKS + SHORT, heavy, load_mode, more)
    first, second, *_ = done.stdout.splitlines()
    assert first == "loaded" and second.startswith("does_not_fit Not enough memory for heavy.gguf"), done.stderr


MEASURE = """
import resource
from cpuchat.engine.llama import kernels
from cpuchat.engine.llama.threads import ThreadPool
from cpuchat.hardware.sysfs import own_cpus

pool = ThreadPool(own_cpus()[:1], 0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for more in range(0, 800 << 20, 40 << 20):
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    found = kernels.measure("Q4_K", pool, (1, 8), 0.01)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(found is not None, flush=True)
"""


def test_a_measurement_for_which_memory_is_short_is_none() -> None:
    done = run(MEASURE)
    assert done.returncode == 0, (done.stdout, done.stderr)
    said = done.stdout.split()
    assert said[0] == "False" and said[-1] == "True"


@pytest.mark.skipif((HERE or "").startswith("AVX-512"), reason="has them all, or all but tiles")
def test_instructions_that_are_reported_and_not_there_mean_llama_cpp_s_kernels() -> None:
    claim = f"""
from cpuchat.models import kernels
kernels.instructions_used = lambda cpu: {WIDEST_FIRST[0]!r}
from cpuchat.engine.llama import bindings, kernels as chosen
print(bindings.kernels_library, chosen.refusal())
"""
    assert run(claim).stdout.startswith("None cpuchat's kernels were built for another engine")


OLDER = """
const char* cpuchat_kernels_version(void) { return VERSION; }
int cpuchat_kernels_formats(void) { return FORMATS; }
const char* cpuchat_kernels_register(const char* wanted) { return wanted; }
void cpuchat_kernels_select(unsigned formats) {}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the library is built with gcc")
def test_a_library_that_lacks_a_function_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defined = [f'-DVERSION="{bindings.ggml_version().decode()}"', f"-DFORMATS={len(kernels.TYPES)}"]
    file = tmp_path / "libcpuchat-kernels.so"
    subprocess.run(["gcc", "-shared", "-fPIC", *defined, "-xc", "-", "-o", file], input=OLDER, text=True, check=True)
    monkeypatch.setattr(kernels, "library", lambda: file)
    assert bindings._open_kernels() is None


# The choice


def choose() -> tuple[frozenset[str], list[str]]:
    return selected.choose(read_model(DEMO), OPTIONS, ONE_CPU, lambda *_: None, AbortFlag())


@pytest.fixture
def measures_q6_k(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let each measurement find that Q6_K is slower with cpuchat's kernels; returns what was measured."""
    kinds: list[str] = []

    def measure(kind: str, *_: object, seconds: float = 1.0) -> MeasuredProducts:
        kinds.extend([kind] if seconds else [])  # 0: only compared
        return measured(0.5 if kind == "Q6_K" else 2.0, kind=kind)

    monkeypatch.setattr(selected, "measure", measure)
    monkeypatch.setattr(selected, "_MUCH", 1 << 20)
    monkeypatch.setattr(selected, "_ROOM", 0)
    return kinds


def test_a_choice_that_cannot_be_saved_holds_for_the_load(
    measures_q6_k: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in the way").touch()
    monkeypatch.setenv("CPUCHAT_CACHE_DIR", str(tmp_path / "in the way" / "cache"))
    types, _ = choose()
    assert sorted(measures_q6_k) == ["Q4_K", "Q6_K"]
    assert "Q4_K" in types and "Q6_K" not in types


def test_a_choice_that_was_cancelled_is_made_by_the_next_load(measures_q6_k: list[str]) -> None:
    abort = AbortFlag()

    def cancel(number: int, _: int) -> None:
        if number == 1:
            abort.set()

    selected.choose(read_model(DEMO), OPTIONS, ONE_CPU, cancel, abort)
    assert [*ProductLog(ONE_CPU).read()] == measures_q6_k
    assert len(measures_q6_k) == 1
    types, _ = choose()
    assert sorted(measures_q6_k) == ["Q4_K", "Q6_K"]
    assert "Q6_K" not in types
