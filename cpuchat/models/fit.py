"""Computes whether a model fits into memory, from its header, before anything is loaded.

Sizes follow llama.cpp of llama-cpp-python 0.3.36: the KV cache exactly (llama-kv-cache.cpp and, for sliding windows,
llama-kv-cache-iswa.cpp), the compute buffer as an estimate that was fitted to its log lines (`_compute_bytes`).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import NamedTuple

import msgspec

from cpuchat.errors import DoesNotFit
from cpuchat.hardware.instructions import Instructions, instructions
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.types import BY_NAME
from cpuchat.models.repack import repacked
from cpuchat.models.windows import windows_of
from cpuchat.protocol import LoadOptions

GB = 1e9
CONTEXT_STEP = 256  # llama.cpp pads n_ctx to this
_LONG = 1 << 31  # tokens, longer than any window
# The process itself: interpreter, libraries, batch arrays, graph metadata.
PROCESS_BYTES = 120_000_000
# Positions of one batch whose logits are kept: those of the longest verify pass (engine.options.N_OUTPUTS_MAX).
VERIFIED = 32

# Architectures of which llama.cpp can keep snapshots of the recurrent state (llm_arch_supports_rs_rollback).
_SNAPSHOT_ARCHITECTURES = frozenset(
    {"kimi-k3", "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "glm5-next", "nemotron_h", "nemotron_h_moe", "lfm2",
     "lfm2moe", "bailingmoe3"}
)  # fmt: skip
# Those among them that copy the convolution part of all snapshots in every pass, plain ones too (build_conv_state in
# delta-net-base.cpp, and what stands for it in the files of these models): it takes 3.5 times as long as reading that
# many bytes of weights (measured, Zen 4).
_COPYING_ARCHITECTURES = frozenset({"qwen35", "qwen35moe", "qwen4exp", "kimi-k3", "glm5-next"})
_COPY_COST = 3.5
_COPY_SHARE = 0.01  # of a plain pass
_MOST_SNAPSHOTS, _FEWEST_SNAPSHOTS = VERIFIED - 1, 2
_SNAPSHOT_BYTES = 256_000_000  # for all snapshots, or this share of the weights:
_SNAPSHOT_SHARE = 0.1
_RECURRENT = re.compile(r"blk\.([^.]*)\.(?:ssm_|time_mix_|shortconv\.)").match


def gigabytes(count: int) -> str:
    """Format bytes as gigabytes: `4.7`; below one, `0.47`."""
    return f"{count / GB:.1f}" if count >= GB else f"{count / GB:.2f}"


class MemoryNeed(msgspec.Struct, frozen=True):
    """The memory that a loaded model takes, in bytes.

    `weights` the file's tensors; `repack` the private repacked copy of some of them; `kv` the KV cache and
    recurrent state; `compute` buffers of the engine and the process. `reclaimable` is the part of `weights` that
    the system may drop because `repack` replaces it, or that is to be read from disk for every token.
    """

    weights: int
    repack: int
    kv: int
    compute: int
    reclaimable: int = 0
    n_ctx: int = 0

    @property
    def total(self) -> int:
        """Return all of it, right after the load."""
        return self.weights + self.repack + self.kv + self.compute

    @property
    def least(self) -> int:
        """Return what it needs to run at full speed: `total` without what the system can drop."""
        return self.total - self.reclaimable

    def breakdown(self, draft: MemoryNeed | None = None) -> str:
        """Explain `least` in GB: `weights 4.7 + KV cache 0.5 (4096 tokens) + draft 0.7 + buffers 0.4`."""
        parts = [f"weights {gigabytes(self.weights - self.reclaimable)}"] if self.weights > self.reclaimable else []
        if self.repack:
            parts.append(f"repacked copy {gigabytes(self.repack)}")
        if self.kv:
            parts.append(f"KV cache {gigabytes(self.kv)} ({self.n_ctx} tokens)")
        if draft is not None:
            parts.append(f"draft {gigabytes(draft.least)}")
        return f"{' + '.join(parts)} + {'buffers' if self.kv else 'KV cache and buffers'} {gigabytes(self.compute)}"


@functools.cache
def _this_cpu() -> Instructions:
    return instructions()


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

    From the shapes of the layer's tensors where possible, else from the head counts. With multi-head
    latent attention only the compressed K row is kept. A draft head has only the layers in its file.
    """
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

    0 for models without such a state or without snapshots, or where more than one costs too much.
    """
    if header.architecture not in _SNAPSHOT_ARCHITECTURES:
        return 0
    layers, (convolution, rest) = len(_recurrent_layers(header)), _recurrent_bytes(header)
    budget = max(_SNAPSHOT_BYTES, int(_SNAPSHOT_SHARE * header.size))
    n = min(most_snapshots(_n_ubatch(options)), budget // max(layers * (convolution + rest), 1))
    if header.architecture in _COPYING_ARCHITECTURES:
        copied = _COPY_COST * layers * convolution
        n = min(n, int(_COPY_SHARE * _bytes_per_token(header) / max(copied, 1)))
    return n if n >= _FEWEST_SNAPSHOTS else 0


def _bytes_per_token(header: GGUFHeader) -> int:
    """Return the bytes of the weights that one token uses: of a mixture of experts, those of its experts."""
    experts = max(header.number("expert_count"), 1)
    used = header.number("expert_used_count") or experts
    tied = not any(t.name == "output.weight" for t in header.tensors)
    weights = (t for t in header.tensors if tied or t.name != "token_embd.weight")
    return sum(t.nbytes * used // experts if t.is_routed else t.nbytes for t in weights)


def most_snapshots(n_ubatch: int) -> int:
    """Return the limit: more are useless, and llama_batch_allocr::split_equal aborts unless n_ubatch > 1 + this."""
    return max(min(_MOST_SNAPSHOTS, n_ubatch - 2), 0)


def rollback_bytes(header: GGUFHeader, n_rs_seq: int) -> tuple[int, int]:
    """Return the bytes for rolling back to an earlier recurrent state: (copies of the state, compute buffer).

    `n_rs_seq` snapshots, or one copy when that is 0. The graph holds those of one layer at a time, and up to three
    states besides (log lines of Mamba, Mamba-2 and gated delta nets).
    """
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
    of 128 and 512, flash attention on and off: never below, at most a third above. The buffer is shared by parts of
    the graph that do not run at once, so the widest of attention, feed-forward, recurrence and logits counts.
    """
    rows = min(_n_ubatch(options), n_ctx) or 1
    flash = options.flash_attn != "off"  # "auto" means on for every model that allows it on a CPU
    width = header.n_embd
    attention = 5 * width + 2 * header.n_head * header.key_length
    if not flash:
        attention += header.n_head * n_ctx  # all scores
    n_experts = options.n_experts or header.number("expert_used_count")
    feed_forward = 4 * width + 3 * header.n_ff + 2 * n_experts * width
    logits = width + header.n_vocab * min(n_outputs, rows) // rows
    inner = header.number("ssm.inner_size")
    convolved = inner + 2 * header.number("ssm.group_count") * header.number("ssm.state_size")
    recurrence = 4 * width + 2 * inner + 3 * convolved
    mask = n_ctx * rows * (2 if flash else 4)
    return (
        4 * rows * max(attention, feed_forward, recurrence, logits) + mask + 4 * n_outputs * header.n_vocab + 4 * n_ctx
    )


def required_memory(
    header: GGUFHeader, options: LoadOptions, n_ctx: int, n_outputs: int = VERIFIED, n_rs_seq: int = 0
) -> MemoryNeed:
    """Return the memory for the model of `header` (of `read_model`) with a context of `n_ctx` tokens.

    Mapped weights count in full: they are page cache that the system may drop, but a model that does not stay in
    memory is read from disk again for every token. With `options.from_disk` that is wanted, and nothing is repacked.
    `n_outputs` is the number of positions of one batch whose logits are kept (cparams.n_outputs_max), `n_rs_seq` that
    of the snapshots of a recurrent state.
    """
    copied = list(repacked(header, _this_cpu())) if options.use_repack and not options.from_disk else []
    repack = sum(nbytes for _, _, nbytes in copied)
    reclaimable = header.size if options.from_disk else sum(tensor.nbytes for tensor, _, _ in copied)
    # Locked pages cannot be dropped. Read into memory, repacked tensors exist only once to begin with.
    locked = options.mlock and options.load_mode == "mmap"
    copies, graph = rollback_bytes(header, n_rs_seq)
    return MemoryNeed(
        weights=header.size,
        repack=repack,
        kv=kv_bytes(header, n_ctx, options.type_k, options.type_v, _n_ubatch(options)) + copies,
        compute=_compute_bytes(header, options, n_ctx, n_outputs) + graph + PROCESS_BYTES,
        reclaimable=0 if locked else reclaimable,
        n_ctx=n_ctx,
    )


def may_stay_on_disk(options: LoadOptions) -> bool:
    """Return whether these options allow weights that stay on disk: mapped, not locked, and not on RPC workers."""
    return options.load_mode == "mmap" and not options.mlock and not options.rpc


def plan_memory(
    header: GGUFHeader, options: LoadOptions, available: int, n_outputs: int = VERIFIED
) -> tuple[MemoryNeed, int]:
    """Return what a load with these options takes, and how many snapshots of a recurrent state are kept.

    The context is that of `choose_context`; there are fewer snapshots where memory is short.
    """
    n_ctx = choose_context(header, options, available)
    n_rs_seq = snapshots(header, options)
    need = required_memory(header, options, n_ctx, n_outputs, n_rs_seq)
    while n_rs_seq and need.least > available:
        n_rs_seq //= 2
        need = required_memory(header, options, n_ctx, n_outputs, n_rs_seq)
    return need, n_rs_seq


def needs_workers(header: GGUFHeader, options: LoadOptions, available: int) -> bool:
    """Return whether RPC workers have to hold some layers: it was asked for, or they do not fit here."""
    if not options.rpc or options.rpc_layers:
        return bool(options.rpc)
    options = msgspec.structs.replace(options, from_disk=False)
    return required_memory(header, options, choose_context(header, options, available)).least > available


def layers_elsewhere(header: GGUFHeader, options: LoadOptions, n_ctx: int, excess: int) -> tuple[int, int]:
    """Return how many of the last layers other machines should hold, and how many bytes that saves here.

    `options.rpc_layers`, else as few as save `excess` bytes.
    """
    weights: Counter[str] = Counter()
    for tensor in header.tensors:
        if tensor.name.startswith("blk."):
            weights[tensor.name.split(".")[1]] += tensor.nbytes
    rows = kv_rows(header)
    saved = 0
    for number, layer in enumerate(reversed(range(header.n_layer))):
        if number >= (options.rpc_layers or header.n_layer) or (not options.rpc_layers and saved >= excess):
            return number, saved
        cells = kv_cells(rows[layer].window, n_ctx, _n_ubatch(options))
        saved += weights[str(layer)] + cells * rows[layer].nbytes(options.type_k, options.type_v)
    return header.n_layer, saved


def draft_memory(draft: GGUFHeader, options: LoadOptions, n_ctx: int) -> MemoryNeed:
    """Return what the draft model or head takes beside a target loaded with these options and `n_ctx` tokens."""
    options = msgspec.structs.replace(options, from_disk=False)
    if draft.is_head:  # llama-server's default
        options = msgspec.structs.replace(options, type_k="f16", type_v="f16")
    return required_memory(draft, options, min(n_ctx, draft.n_ctx_train or n_ctx))


def largest_context(header: GGUFHeader, options: LoadOptions, available: int, draft: GGUFHeader | None = None) -> int:
    """Return the longest context, in tokens, that fits into `available` bytes; 0 when not even 256 tokens do.

    Never more than the model was trained for. With the header of a `draft` model, both fit.
    """

    def least(n_ctx: int) -> int:
        beside = draft_memory(draft, options, n_ctx).least if draft is not None else 0
        return required_memory(header, options, n_ctx).least + beside

    low, high = 0, max((header.n_ctx_train or 1 << 20) // CONTEXT_STEP, 1)
    while low < high:
        middle = (low + high + 1) // 2
        if least(middle * CONTEXT_STEP) <= available:
            low = middle
        else:
            high = middle - 1
    return low * CONTEXT_STEP


def choose_context(header: GGUFHeader, options: LoadOptions, available: int, wanted: int = 8192) -> int:
    """Return the context to use by default: `wanted`, less if training or memory allow only less.

    At least 256, so that `check_fit` can explain what is missing.
    """
    if options.n_ctx:
        return options.n_ctx
    limit = min(wanted, header.n_ctx_train or wanted)
    if required_memory(header, options, limit).least <= available:
        return limit
    return max(min(limit, largest_context(header, options, available)), min(limit, CONTEXT_STEP))


def check_fit(
    need: MemoryNeed,
    available_bytes: int,
    header: GGUFHeader | None = None,
    options: LoadOptions | None = None,
    draft: MemoryNeed | None = None,
) -> None:
    """Refuse a model that cannot fit. With `header` and `options` the hint names a context that would.

    Raises:
        DoesNotFit: `need.least`, with that of a `draft`, is more than `available_bytes`; the message holds the sum.
    """
    total, in_all = need.least + (draft.least if draft is not None else 0), available_bytes
    if total <= available_bytes:
        return
    available_bytes -= total - need.least
    ideas: list[str] = []
    stays_on_disk = False
    if header is not None and options is not None:
        fitting = min(largest_context(header, options, available_bytes), need.n_ctx)
        quantized = msgspec.structs.replace(options, type_k="q8_0", type_v="q8_0", flash_attn="auto")
        if fitting:
            ideas.append(f"--ctx {fitting} would fit")
        if options.type_k in ("f16", "f32", "bf16") and options.flash_attn != "off":
            longer = min(largest_context(header, quantized, available_bytes), need.n_ctx)
            if longer > fitting:
                ideas.append(f"a q8_0 KV cache allows {longer} tokens")
        on_disk = required_memory(header, msgspec.structs.replace(options, from_disk=True), need.n_ctx)
        stays_on_disk = may_stay_on_disk(options) and on_disk.least <= available_bytes
    elif need.weights - need.reclaimable + need.repack + need.compute < available_bytes:
        ideas += ["use a smaller --ctx", "quantize the KV cache (q8_0)"]
    if not ideas:
        ideas.append("choose a smaller model or quantization")
    if stays_on_disk:
        ideas.append("read the weights from disk for every token, which is slow (--from-disk)")
    hint = ", or ".join(ideas)
    raise DoesNotFit(
        f"Not enough memory: the model needs {gigabytes(total)} GB = {need.breakdown(draft)}, and "
        f"{gigabytes(in_all)} GB are available.",
        hint[0].upper() + hint[1:] + ".",
    )
