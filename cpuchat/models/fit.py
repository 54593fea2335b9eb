"""Computes the memory that a model takes on this CPU, from its header, before anything is loaded, and whether it fits.

Follows llama.cpp of llama-cpp-python 0.3.36: the KV cache exactly (llama-kv-cache.cpp; its sliding windows:
llama-kv-cache-iswa.cpp, `load_swa_pattern(...)`, `is_swa_impl` and `n_swa` in src/models/*.cpp), the weights that it
repacks at load (ggml-cpu/repack.cpp and ggml-cpu/amx/, which is asked first; not for RISC-V and s390x), and the compute
buffer as an estimate that was fitted to its log lines (`_compute_bytes`).

Repacking interleaves the rows of a matrix, so that one instruction works on several of them. Prefill gains most: 1.5 to
3.7 times as fast on ARM, decoding 0.9 to 1.2 times (pull requests 16739, 17494, 18096 and 19360 of llama.cpp).
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import DoesNotFit
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.hardware.topology import Instructions
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.engine_version import COPIES_SNAPSHOTS, SNAPSHOTS
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import BY_NAME, LazyArray, TensorInfo
from cpuchat.models.heads import included_layers, is_own
from cpuchat.models.kernels import chosen_types, instructions_used, rows_of
from cpuchat.protocol.messages import AUTO_PARALLEL, LoadOptions
from cpuchat.telemetry import units

_SVE_BYTES = 32  # the kernels are for vectors of that length only
_AMX_ROWS = 32  # TILE_N * 2
_OVERRUN, _HUGE_PAGE = 16 << 10, 2 << 20  # of the buffer of cpuchat's kernels: read behind its end, and its unit
# Type: (a row must be a multiple of this many values, bytes that a block grows by).
_AMX: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 0), "Q4_1": (32, 0), "Q8_0": (32, 4), "Q4_K": (256, 4), "Q5_K": (256, 4), "Q6_K": (256, 0),
    "IQ4_XS": (256, 2), "F16": (16, 0),
}  # fmt: skip


class RepackFormat(msgspec.Struct, frozen=True):
    """A memory format for the instructions named `cpu`. The number of rows must be a multiple of `rows`.

    `name` is `8×4` for 8 rows that are interleaved by 4 bytes each, `tiles` for those of AMX, and `copy` for what AMX
    keeps as it is, but in memory of its own. `group` is how many rows cpuchat's kernels lay out together; 0 for formats
    of llama.cpp."""

    name: str
    rows: int
    cpu: str
    group: int = 0

    @property
    def words(self) -> str:
        """`repacked 8×8 for AVX-512 VNNI`."""
        if self.name == "copy":
            return f"copied for {self.cpu}"
        return f"repacked {'into tiles' if self.name == 'tiles' else self.name} for {self.cpu}"


def format_of(kind: str, cpu: Instructions, ours: Collection[str] = ()) -> RepackFormat | None:
    """Return how matrices of the tensor type `kind` are repacked on `cpu`; None: used as in the file. `ours` are the
    types for which cpuchat's kernels are used (`kernels.chosen_types`)."""
    if kind in ours:
        instructions = instructions_used(cpu)
        rows = rows_of(instructions)
        return RepackFormat(f"in {rows} rows", 1, instructions, rows)
    if _has_amx(cpu) and kind in _AMX:
        return RepackFormat("copy" if kind == "F16" else "tiles", _AMX_ROWS, "AMX")
    return next(_interleaved(kind, cpu), None)


def _has_amx(cpu: Instructions) -> bool:
    return {"AMX_INT8", "AVX512_VNNI"} <= cpu.features


def _interleaved(kind: str, cpu: Instructions) -> Iterator[RepackFormat]:
    """Yield the formats in the order in which they are tried: the first that fits the number of rows is used."""
    features = cpu.features
    if "AVX2" in features and (
        kind in ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4") or (kind == "Q2_K" and "AVX512" in features)
    ):
        avx512 = "AVX-512 VNNI" if "AVX512_VNNI" in features else "AVX-512"
        avx2 = "AVX-VNNI" if "AVX_VNNI" in features else "AVX2"
        yield RepackFormat("8×8", 8, avx512 if "AVX512" in features else avx2)
    if "NEON" not in features:
        return
    if "MATMUL_INT8" in features:
        if kind == "Q4_0" and "SVE" in features and cpu.sve_bytes == _SVE_BYTES:
            yield RepackFormat("8×8", 8, "SVE i8mm")
        if kind in ("Q4_0", "Q8_0", "Q1_0"):
            yield RepackFormat("4×8", 4, "i8mm")
        if kind in ("Q4_K", "Q5_K", "Q6_K"):
            yield RepackFormat("8×8", 8, "i8mm")
    if "DOTPROD" in features:
        if kind in ("Q4_0", "Q8_0", "Q1_0", "IQ4_NL", "MXFP4"):
            yield RepackFormat("4×4", 4, "dotprod")
        if kind in ("Q4_K", "Q5_K", "Q6_K"):
            yield RepackFormat("8×4", 8, "dotprod")


def repacked(
    header: GGUFHeader, cpu: Instructions, ours: Collection[str] = ()
) -> Iterator[tuple[TensorInfo, RepackFormat, int]]:
    """Yield the tensors of which `cpu` needs a copy, its format, and its bytes (AMX adds sums to some blocks, and a
    group of cpuchat's kernels ends on a cache line). `ours` is that of `format_of`."""
    head = header.output_matrix  # rows of the embedding table are looked up; only as the head it is multiplied with
    for tensor in header.tensors:
        is_product = tensor.name.startswith("blk.") or tensor.name == head
        if not is_product or len(tensor.shape) != (3 if tensor.is_routed else 2):
            continue
        kind, (values, rows) = tensor.type, tensor.shape[:2]
        in_tiles = _has_amx(cpu) and kind in _AMX and not tensor.is_routed
        if kind in ours and values % BY_NAME[kind].block == 0:
            layout = format_of(kind, cpu, ours)
        elif in_tiles and rows % _AMX_ROWS == 0 and values % _AMX[kind][0] == 0:
            layout = format_of(kind, cpu)
        else:
            layout = next((one for one in _interleaved(kind, cpu) if rows % one.rows == 0), None)
        if layout is None:
            continue
        nbytes = tensor.nbytes
        if layout.group:
            n_matrices = tensor.n_elements // (values * rows)
            group = _rounded_up(nbytes // (rows * n_matrices) * layout.group, 64)
            nbytes = n_matrices * -(-rows // layout.group) * group
        elif layout.cpu == "AMX":
            nbytes += tensor.n_elements // BY_NAME[kind].block * _AMX[kind][1]
        yield tensor, layout, nbytes


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class _Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`every` so many layers one has no window, the last of them unless `full_first`; 0: all have one; 1: those that
    the pattern of the header names. `size` is the window when the header names none, `fixed` the one whatever it
    names."""

    every: int
    full_first: bool = False
    size: int = 0
    fixed: int = 0


@functools.cache
def _windows() -> dict[str, _Window]:
    """Return the windows by architecture. Others have none, even where the header names one. Chunks (llama4) count as
    windows of their full length. The windows of deepseek4 are not here: its cache is of a kind of its own
    (llama_kv_cache_dsv4)."""
    rows = Path(__file__).with_name("attention_windows.json").read_bytes()
    return msgspec.json.decode(rows, type=prepared(dict[str, _Window]))


_EXAONE4_LAYERS = 64  # only the model of that size has windows


LAZY_BYTES = 4 << 30
_LAZY = frozenset({"gemma4", "qwen4exp"})  # whose files in src/models/ say TENSOR_READ_LAZY
LAYER_TABLE = "per_layer_token_embd.weight"
"""Embeddings of tokens for every layer, or of n-grams."""


def lazy_bytes(header: GGUFHeader) -> int:
    """Return the bytes of the table that llama.cpp maps and does not load, whatever the load mode, as a token reads
    rows of it (lazy_read::add in llama-model-loader.cpp)."""
    tables = (tensor.nbytes for tensor in header.tensors if tensor.name == LAYER_TABLE and tensor.nbytes > LAZY_BYTES)
    return sum(tables) if header.architecture in _LAZY else 0


def windows_of(header: GGUFHeader) -> list[int]:
    """Return the attention window of each layer in tokens, the current one included; 0: all tokens."""
    n_layer, known = header.n_layer, _windows().get(header.architecture)
    if known is None or (header.architecture == "exaone4" and header.decoding_layers != _EXAONE4_LAYERS):
        return [0] * n_layer
    size = header.number("attention.sliding_window", known.size)
    size = known.fixed if size and known.fixed else size
    pattern = header.value("attention.sliding_window_pattern")
    if isinstance(pattern, LazyArray):
        flags = [bool(flag) for flag in pattern.first(n_layer)]
    else:
        every = pattern if isinstance(pattern, int) and pattern >= 0 else known.every
        full = 0 if known.full_first else every - 1
        flags = [every == 0 or layer % every != full for layer in range(header.decoding_layers)]
    return [size if flag else 0 for flag in flags] + [0] * (n_layer - len(flags))


GB = 1e9
CONTEXT_STEP = 256  # llama.cpp pads n_ctx to this
_LONG = 1 << 31  # tokens, longer than any window
# The process itself: interpreter, libraries, batch arrays, graph metadata.
PROCESS_BYTES = 120_000_000
# Positions of one batch whose logits are kept: those of the longest verify pass (engine.options.N_OUTPUTS_MAX).
VERIFIED = 32

# Copying all snapshots takes 3.5 times as long as reading that many bytes of weights (measured, Zen 4).
_COPY_COST = 3.5
COPY_SHARE = 0.01  # of a plain pass
# Beside a draft model or head that many pay even at this share: without snapshots, accepted tokens are evaluated again.
_DRAFTING_SNAPSHOTS, _DRAFTING_SHARE = 4, 0.04
_MAX_SNAPSHOTS, _FEWEST_SNAPSHOTS = VERIFIED - 1, 2
SNAPSHOT_BYTES = 256_000_000  # for all snapshots, or this share of the weights:
SNAPSHOT_SHARE = 0.1
_RECURRENT = re.compile(r"blk\.([^.]*)\.(?:ssm_|time_mix_|shortconv\.)").match


def gigabytes(count: int) -> str:
    """Format bytes as gigabytes: `4.7`; below one, `0.47`."""
    return f"{count / GB:.1f}" if count >= GB else f"{count / GB:.2f}"


def _part(count: int) -> str:
    return gigabytes(count) if count >= GB / 100 else units.size(count)


class MemoryNeed(msgspec.Struct, frozen=True):
    """The memory that a loaded model takes, in bytes.

    `weights` the file's tensors, without those that are given back at the load; `repack` the private repacked copy of
    some of them; `kv` the KV cache and recurrent state; `compute` buffers of the engine and the process. `reclaimable`
    is the part of `weights` that the system may drop because `repack` replaces it, or of which a token reads rows from
    disk (`lazy_bytes`). `kv` is that of `parallel` answers, each of `n_ctx` tokens."""

    weights: int
    repack: int
    kv: int
    compute: int
    reclaimable: int = 0
    n_ctx: int = 0
    parallel: int = 1

    @property
    def total(self) -> int:
        """Return all of it, right after the load."""
        return self.weights + self.repack + self.kv + self.compute

    @property
    def min_bytes(self) -> int:
        """Return what it needs to run at full speed: `total` without what the system can drop."""
        return self.total - self.reclaimable

    def breakdown(self, draft: MemoryNeed | None = None) -> str:
        """Explain `min_bytes` in GB: `weights 4.7 + KV cache 0.5 (4,096 tokens) + draft 0.7 + buffers 0.4`; below 10 MB
        in MB."""
        weights = self.weights - self.reclaimable + self.repack  # a repacked copy replaces what it was made of
        parts = [f"weights {_part(weights)}"] if weights > 0 else []
        if self.kv:
            times = f"{self.parallel} × " if self.parallel > 1 else ""
            parts.append(f"KV cache {_part(self.kv)} ({times}{self.n_ctx:,} tokens)")
        if draft is not None:
            parts.append(f"draft {_part(draft.min_bytes)}")
        rest = f"{'buffers' if self.kv else 'KV cache and buffers'} {_part(self.compute)}"
        return f"{' + '.join(parts)} + {rest}{' GB' * (not rest.endswith('B'))}"


class KVRow(NamedTuple):
    """A token's K and V in one layer, in values; (0, 0) without attention. `window` as in `windows_of`."""

    k: int
    v: int
    window: int

    def nbytes(self, type_k: str, type_v: str) -> int:
        """Return the bytes of the row in these cache types."""
        kinds = BY_NAME[type_k.upper()], BY_NAME[type_v.upper()]
        return sum(-(-values // kind.block) * kind.nbytes for values, kind in zip(self[:2], kinds, strict=True))


def kv_bytes(
    header: GGUFHeader, n_ctx: int, type_k: str = "f16", type_v: str = "f16", n_ubatch: int = LoadOptions().n_ubatch
) -> int:
    """Return the bytes of KV cache and recurrent state of one sequence."""
    rows = kv_by_window(header, type_k, type_v).items()
    return sum(nbytes * kv_cells(window, n_ctx, n_ubatch) for window, nbytes in rows) + state_bytes(header)


def kv_cells(window: int, n_ctx: int, n_ubatch: int) -> int:
    """Return the tokens that the cache of a layer with this window holds (0: none), as in llama_kv_cache_iswa."""
    n_ctx, windowed = (-(-cells // CONTEXT_STEP) * CONTEXT_STEP for cells in (n_ctx, window + n_ubatch))
    return min(n_ctx, windowed) if window else n_ctx


def kv_by_window(header: GGUFHeader, type_k: str = "f16", type_v: str = "f16") -> dict[int, int]:
    """Return the bytes of KV cache that a token takes in all layers, by their window (0: none), widest last."""
    totals: Counter[int] = Counter()
    rows = kv_rows(header)
    for row in rows[: len(rows) - header.number("attention.shared_kv_layers")]:
        totals[row.window] += row.nbytes(type_k, type_v)
    return {window: nbytes for window, nbytes in sorted(totals.items()) if nbytes}


def kv_growth(header: GGUFHeader, options: LoadOptions) -> tuple[int, int]:
    """Return the bytes of KV cache that each token of the context takes, and those that long contexts take beside it:
    layers with a sliding window keep no more."""
    rows = kv_by_window(header, options.type_k, options.type_v)
    growing = rows.pop(0, 0)
    return growing, sum(nbytes * kv_cells(window, _LONG, _n_ubatch(options)) for window, nbytes in rows.items())


def kv_rows(header: GGUFHeader) -> list[KVRow]:
    """Return the K and V rows of every layer.

    From the shapes of the layer's tensors where possible, else from the head counts. With multi-head latent attention
    only the compressed K row is kept. A draft head has only the layers in its file."""
    shapes = {t.name: t.shape for t in header.tensors if t.name.startswith("blk.") and len(t.shape) > 1}
    recurrent = _recurrent_layers(header)
    is_mla = bool(header.number("attention.key_length_mla"))
    k_length = max(header.key_length, header.number("attention.key_length_swa"))
    v_length = max(header.value_length, header.number("attention.value_length_swa"))
    windows = dict(enumerate(windows_of(header)))
    numbered = [(str(layer), heads) for layer, heads in enumerate(header.heads_kv)]
    if header.is_head and numbered:  # its layers are the last of a model's, and it counts them all
        there = {t.name.split(".")[1] for t in header.tensors if t.name.startswith("blk.")}
        numbered = [(layer, numbered[-1][1]) for layer in sorted(there)]
    rows: list[KVRow] = []
    for layer, heads in numbered:
        prefix = f"blk.{layer}."
        k_row, v_row = heads * k_length, heads * v_length
        if prefix + "attn_k.weight" in shapes:
            k_row = shapes[prefix + "attn_k.weight"][1]
            v_row = shapes.get(prefix + "attn_v.weight", (0, k_row))[1]
        elif is_mla and prefix + "attn_kv_a_mqa.weight" in shapes:
            k_row, v_row = shapes[prefix + "attn_kv_a_mqa.weight"][1], 0
        elif layer in recurrent:
            k_row = v_row = 0
        rows.append(KVRow(k_row, v_row, windows.get(int(layer), 0) if layer.isdecimal() else 0))
    return rows


def state_bytes(header: GGUFHeader) -> int:
    """Return the bytes of the recurrent state of all layers."""
    return len(_recurrent_layers(header)) * sum(_recurrent_bytes(header))


def _recurrent_layers(header: GGUFHeader) -> set[str]:
    return {match[1] for t in header.tensors if (match := _RECURRENT(t.name))}


def _recurrent_bytes(header: GGUFHeader) -> tuple[int, int]:
    """Return the bytes of one recurrent layer's state in two parts (llama_hparams::n_embd_r and n_embd_s), F32."""
    head_size = header.number("wkv.head_size")
    if head_size:
        return 4 * header.n_embd * header.number("token_shift_count", 2), 4 * header.n_embd * head_size
    if header.number("shortconv.l_cache"):
        return 4 * header.n_embd * (header.number("shortconv.l_cache") - 1), 0
    kernel = header.number("ssm.conv_kernel")
    head_size = header.number("kda.head_dim")
    if head_size:
        return 4 * 3 * (kernel - 1 if kernel else 3) * header.n_head * head_size, 4 * header.n_head * head_size**2
    inner, state = header.number("ssm.inner_size"), header.number("ssm.state_size")
    convolution = max(kernel - 1, 0) * (inner + 2 * header.number("ssm.group_count") * state)
    return 4 * convolution, 4 * state * inner


def snapshots(header: GGUFHeader, options: LoadOptions) -> int:
    """Return how many snapshots of a recurrent state are worth their memory and time: the longest draft that can be
    rolled back.

    0 for models without such a state or without snapshots, or where more than one costs too much."""
    if header.architecture not in SNAPSHOTS:
        return 0
    layers, (convolution, rest) = len(_recurrent_layers(header)), _recurrent_bytes(header)
    budget = max(SNAPSHOT_BYTES, int(SNAPSHOT_SHARE * header.size))
    n = min(max_snapshots(_n_ubatch(options)), budget // max(layers * (convolution + rest), 1))
    if header.architecture in COPIES_SNAPSHOTS:
        # Of a mixture of experts a token reads those that it is sent to.
        experts = max(header.number("expert_count"), 1)
        used, head = header.number("expert_used_count") or experts, header.output_matrix
        weights = (t for t in header.tensors if t.name == head or t.name != "token_embd.weight")
        read = sum(t.nbytes * used // experts if t.is_routed else t.nbytes for t in weights)
        copies = read / max(_COPY_COST * layers * convolution, 1)
        more = min(_DRAFTING_SNAPSHOTS, int(_DRAFTING_SHARE * copies)) if options.draft_path else 0
        n = min(n, max(int(COPY_SHARE * copies), more))
    return n if n >= _FEWEST_SNAPSHOTS else 0


def max_snapshots(n_ubatch: int) -> int:
    """Return the limit: more are useless, and llama_batch_allocr::split_equal aborts unless n_ubatch > 1 + this."""
    return max(min(_MAX_SNAPSHOTS, n_ubatch - 2), 0)


def rollback_bytes(header: GGUFHeader, n_rs_seq: int) -> tuple[int, int]:
    """Return the bytes for rolling back to an earlier recurrent state: (copies of the state, compute buffer).

    `n_rs_seq` snapshots, or one copy when that is 0. The graph holds those of one layer at a time, and up to three
    states besides (log lines of Mamba, Mamba-2 and gated delta nets)."""
    layers, state = len(_recurrent_layers(header)), sum(_recurrent_bytes(header))
    if not layers:
        return 0, 0
    copies = n_rs_seq or 1
    return copies * layers * state, (copies + 3) * state


def _n_ubatch(options: LoadOptions) -> int:
    """Return the tokens of a graph (cparams.n_ubatch), of a context that is not shorter."""
    return min(options.n_ubatch, options.n_batch)


def _compute_bytes(header: GGUFHeader, options: LoadOptions, n_ctx: int, n_outputs: int) -> int:
    """Estimate of llama.cpp's "compute buffer size" plus its output buffer.

    Fitted to the log lines for dense and expert models of 2M to 30B parameters, contexts of 512 to 16,384 and batches
    of 128 and 512, flash attention on and off: never below, at most a third above. The buffer is shared by parts of the
    graph that do not run at once, so the widest of attention, feed-forward, recurrence and logits counts."""
    rows = min(_n_ubatch(options), n_ctx) or 1
    flash = options.flash_attn != "off"  # "auto" means on for every model that allows it on a CPU
    width = header.n_embd
    attention = 5 * width + 2 * header.n_head * header.key_length
    if not flash:
        attention += header.n_head * n_ctx  # all scores
    feed_forward = 4 * width + 3 * header.n_ff + 2 * header.number("expert_used_count") * width
    logits = width + header.n_vocab * min(n_outputs, rows) // rows
    inner = header.number("ssm.inner_size")
    convolved = inner + 2 * header.number("ssm.group_count") * header.number("ssm.state_size")
    recurrence = 4 * width + 2 * inner + 3 * convolved
    mask = n_ctx * rows * (2 if flash else 4)
    return (
        4 * rows * max(attention, feed_forward, recurrence, logits) + mask + 4 * n_outputs * header.n_vocab + 4 * n_ctx
    )


# tiles_at_once, part_cells, most_rows and most_values in cpuchat/kernels/floats.cpp
_TILES, _PART_CELLS, _TILE_ROWS, _MOST_VALUES = 8, 512, 6, 256


@functools.cache
def _n_cpus() -> int:
    return len(own_cpus())  # asked once: later a worker's threads are pinned


def required_memory(
    header: GGUFHeader, options: LoadOptions, n_ctx: int, n_outputs: int = VERIFIED, n_rs_seq: int = 0
) -> MemoryNeed:
    """Return the memory for the model of `header` (of `read_model`) with a context of `n_ctx` tokens.

    Mapped weights count in full: they are page cache that the system may drop, but a model that does not stay in memory
    is read from disk again for every token. Tables of `lazy_bytes` are `reclaimable`. What cpuchat's kernels lay out is
    given back to the page cache at once. `n_outputs` is the number of positions of one batch whose logits are kept
    (cparams.n_outputs_max), `n_rs_seq` that of the snapshots of a recurrent state."""
    cpu = engine_cpu(options.cpu_module)
    copied = list(repacked(header, cpu, chosen_types(cpu, options.kernels))) if options.use_repack else []
    repack = sum(nbytes for _, layout, nbytes in copied if not layout.group)
    laid_out = sum(nbytes for _, layout, nbytes in copied if layout.group)
    repack += _rounded_up(laid_out + _OVERRUN, _HUGE_PAGE) if laid_out else 0
    lazy = lazy_bytes(header)
    is_mapped = options.load_mode == "mmap"
    # Locked pages cannot be dropped. Read into memory, repacked tensors exist only once to begin with, unless rows of
    # them are looked up too.
    locked = options.mlock and is_mapped
    once = (t.nbytes for t, layout, _ in copied if (layout.group if is_mapped else t.name != "token_embd.weight"))
    given_back = 0 if locked else sum(once)
    replaced = sum(tensor.nbytes for tensor, _, _ in copied) - given_back if is_mapped else 0
    copies, graph = rollback_bytes(header, n_rs_seq)
    is_f16 = options.type_k == options.type_v == "f16"
    if laid_out and options.flash_attn != "off" and is_f16 and header.key_length <= _MOST_VALUES:
        # The most that attention of cpuchat's kernels takes beside the graph (attention_bytes in floats.cpp): 20 MB
        # with 96 threads at 16,384 tokens. Fewer than two tiles for each thread are computed in parts of the cache, and
        # each tile keeps what it found in each.
        tile = 4 * _TILE_ROWS * (header.key_length + 8)
        graph += _n_cpus() * max(2 * -(-n_ctx // _PART_CELLS), _TILES + 1) * tile
    n_lanes = 1 if state_bytes(header) else options.parallel or 1
    return MemoryNeed(
        weights=header.size - given_back,
        repack=repack,
        kv=n_lanes * kv_bytes(header, n_ctx, options.type_k, options.type_v, _n_ubatch(options)) + copies,
        compute=_compute_bytes(header, options, n_ctx, n_outputs) + graph + PROCESS_BYTES,
        reclaimable=lazy if locked else lazy + replaced,
        n_ctx=n_ctx,
        parallel=n_lanes,
    )


def plan_memory(
    header: GGUFHeader, options: LoadOptions, available: int, n_outputs: int = VERIFIED
) -> tuple[MemoryNeed, int]:
    """Return what a load with these options takes, and how many snapshots of a recurrent state are kept.

    The context is that of `choose_context`; there are fewer snapshots where memory is short. Where nobody chose how
    many answers run at once, their KV caches take at most half of what one leaves."""
    n_ctx = choose_context(header, options, available)
    if not options.parallel and not state_bytes(header):
        alone = required_memory(header, options, n_ctx, n_outputs)
        more = max(available - alone.min_bytes, 0) // 2 // max(alone.kv, 1)
        options = msgspec.structs.replace(options, parallel=min(1 + more, AUTO_PARALLEL))
    n_rs_seq = snapshots(header, options)
    need = required_memory(header, options, n_ctx, n_outputs, n_rs_seq)
    while n_rs_seq and need.min_bytes > available:
        n_rs_seq //= 2
        need = required_memory(header, options, n_ctx, n_outputs, n_rs_seq)
    return need, n_rs_seq


class HeadSize(msgspec.Struct, frozen=True):
    """The bytes of a draft head: of its `weights`, and of its KV cache for each token of the context (`kv`)."""

    weights: int
    kv: int


def head_size(header: GGUFHeader, options: LoadOptions) -> HeadSize | None:
    """Return the size of the head in this file, or of the MTP layers that a model contains; None without any."""
    first = 0 if header.is_head else header.decoding_layers
    if not header.is_head and not included_layers(header):
        return None
    blocks = tuple(f"blk.{layer}." for layer in range(first, header.n_layer))
    weights = sum(one.nbytes for one in header.tensors if header.is_head or one.name.startswith(blocks))
    return HeadSize(weights, sum(row.nbytes(options.type_k, options.type_v) for row in kv_rows(header)[first:]))


def draft_memory(draft: GGUFHeader, options: LoadOptions, n_ctx: int, target: GGUFHeader | None = None) -> MemoryNeed:
    """Return what the draft model or head takes beside a target loaded with these options and `n_ctx` tokens. Of the
    head that `target` itself contains, `required_memory` counts weights and KV cache with the others."""
    own = target is not None and is_own(target.path, draft.path)
    is_head = own or draft.is_head
    width = max(draft.number("target_hidden_size"), draft.n_embd) * (3 if draft.architecture == "eagle3" else 1)
    # llama.cpp's buffer of hidden states, and those that the worker keeps (engine.drafting.head).
    hidden = 4 * width * (2 * options.n_batch + 1024) if is_head else 0
    if own:
        return MemoryNeed(0, 0, 0, _compute_bytes(draft, options, n_ctx, VERIFIED) + hidden, n_ctx=n_ctx)
    options = msgspec.structs.replace(options, parallel=1)  # it follows one answer
    need = required_memory(draft, options, n_ctx if is_head else min(n_ctx, draft.n_ctx_train or n_ctx))
    return msgspec.structs.replace(need, compute=need.compute + hidden)


def largest_context(header: GGUFHeader, options: LoadOptions, available: int, draft: GGUFHeader | None = None) -> int:
    """Return the longest context, in tokens, that fits into `available` bytes; 0 when not even 256 tokens do.

    Never more than the model was trained for. With the header of a `draft` model, both fit."""

    def min_bytes(n_ctx: int) -> int:
        beside = draft_memory(draft, options, n_ctx, header).min_bytes if draft else 0
        return required_memory(header, options, n_ctx).min_bytes + beside

    sizes = range(CONTEXT_STEP, max(header.n_ctx_train or 1 << 20, CONTEXT_STEP) + 1, CONTEXT_STEP)
    return CONTEXT_STEP * bisect_right(sizes, available, key=min_bytes)


def choose_context(header: GGUFHeader, options: LoadOptions, available: int) -> int:
    """Return the context to use by default: 8,192 tokens, less if training or memory allow only less.

    At least 256, so that `check_fit` can explain what is missing."""
    if options.n_ctx:
        return options.n_ctx
    limit = min(8192, header.n_ctx_train or 8192)
    if required_memory(header, options, limit).min_bytes <= available:
        return limit
    return max(min(limit, largest_context(header, options, available)), min(limit, CONTEXT_STEP))


def check_fit(
    need: MemoryNeed, available_bytes: int, header: GGUFHeader | None = None, options: LoadOptions | None = None
) -> None:
    """Refuse a model that cannot fit. With `header` and `options` the hint names a context that would. Raises
    DoesNotFit: `need.min_bytes` is more than `available_bytes`; the message holds the sum."""
    if need.min_bytes <= available_bytes:
        return
    ideas: list[str] = []
    if header is not None and options is not None:
        fitting = min(largest_context(header, options, available_bytes), need.n_ctx)
        quantized = msgspec.structs.replace(options, type_k="q8_0", type_v="q8_0", flash_attn="auto")
        if fitting:
            ideas.append(f"--ctx {fitting} would fit")
        if options.type_k in ("f16", "f32", "bf16") and options.flash_attn != "off":
            longer = min(largest_context(header, quantized, available_bytes), need.n_ctx)
            if longer > fitting:
                ideas.append(f"a q8_0 KV cache allows {longer:,} tokens (prefill at 4k: half as fast)")
    elif need.weights - need.reclaimable + need.repack + need.compute < available_bytes:
        ideas += ["use a smaller --ctx", "quantize the KV cache (q8_0; prefill at 4k: half as fast)"]
    if not ideas:
        ideas.append("choose a smaller model or quantization")
    hint = ", or ".join(ideas)
    raise DoesNotFit(
        f"Not enough memory: the model needs {gigabytes(need.min_bytes)} GB = {need.breakdown()}, and "
        f"{gigabytes(available_bytes)} GB are available.",
        hint[0].upper() + hint[1:] + ".",
    )
