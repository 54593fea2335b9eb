"""Checks and completes load options before llama.cpp sees them.

llama.cpp answers most wrong options by aborting the process, or with a NULL and no reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from cpuchat.engine.llama import bindings
from cpuchat.errors import ModelUnsupported, UsageError
from cpuchat.models.fit import MemoryNeed, check_fit, plan_memory
from cpuchat.models.from_disk import where_needed
from cpuchat.models.gguf.arrays import LazyArray
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.protocol import MIN_CTX, LoadOptions
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

N_OUTPUTS_MAX: Final = MAX_DEPTH + 1
"""Rows of logits per batch: enough for the longest verify pass. Each costs 4 * n_vocab bytes."""

_MAX_CTX = 1 << 24
_MAX_BATCH = 1 << 16
_EXPERTS_USED: Final = "expert_used_count"

_CACHE_TYPES: Final[dict[str, int]] = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20,
}  # fmt: skip
_FLASH: Final = {"auto": -1, "off": 0, "on": 1}
_LOAD_MODE: Final = {("read", False): 0, ("mmap", False): 1, ("read", True): 2, ("mmap", True): 3}


@dataclass(frozen=True)
class LoadPlan:
    """Options as llama.cpp takes them (its enum values), and what they cost.

    Attributes:
        n_outputs: rows of logits that one batch may ask for.
        n_rs_seq: snapshots of a recurrent state to request (`rollback.Bounded`).
        notes: for the user.
        experts: header value to override so that a token uses another number of experts.
        from_disk: the weights stay on disk.
    """

    n_ctx: int
    n_batch: int
    n_ubatch: int
    type_k: int
    type_v: int
    flash_attn: int
    load_mode: int
    need: MemoryNeed
    n_outputs: int = N_OUTPUTS_MAX
    n_rs_seq: int = 0
    notes: tuple[str, ...] = ()
    experts: tuple[str, int] | None = None
    from_disk: bool = False


def plan_load(header: GGUFHeader, options: LoadOptions, available: int, n_outputs: int = N_OUTPUTS_MAX) -> LoadPlan:
    """Check `options` against the model, the machine and `available` bytes of memory.

    Raises:
        UsageError: an option is out of range or two contradict each other; the message names them.
        ModelUnsupported: the file is no language model.
        DoesNotFit: not enough memory; the message holds the arithmetic.
    """
    if header.other:
        raise ModelUnsupported(
            f"{header.path.name} is {header.other}, not a language model.", "Choose the main GGUF file beside it."
        )
    check_numbers(options)
    check_cache_types(header, options)
    notes: list[str] = []
    experts = None
    if options.n_experts and header.number("expert_count") < 2:  # a setting that was made for another model
        notes.append("Not a mixture-of-experts model: the number of experts has no effect.")
    else:
        experts = expert_override(header, options.n_experts)
    if experts is not None:
        notes.append(_expert_note(experts[1], header.number(_EXPERTS_USED)))
        header = msgspec.structs.replace(header, metadata=header.metadata | dict([experts]))
    options = where_needed(header, options, available)
    need, n_rs_seq = plan_memory(header, options, available, n_outputs)
    n_ctx = need.n_ctx
    check_fit(need, available, header, options)
    if options.mlock:
        _check_lock(header.file_size)
    if header.n_ctx_train and n_ctx > header.n_ctx_train:
        notes.append(
            f"The context of {n_ctx:,} tokens is longer than the {header.n_ctx_train:,} that this model was trained "
            "with: quality may drop in long chats."
        )
    return LoadPlan(
        n_ctx=n_ctx,
        n_batch=min(options.n_batch, n_ctx),
        n_ubatch=min(options.n_ubatch, options.n_batch, n_ctx),
        type_k=_CACHE_TYPES[options.type_k],
        type_v=_CACHE_TYPES[options.type_v],
        flash_attn=_FLASH[options.flash_attn],
        load_mode=_LOAD_MODE[options.load_mode, options.mlock],
        need=need,
        n_outputs=n_outputs,
        n_rs_seq=n_rs_seq,
        notes=tuple(notes),
        experts=experts,
        from_disk=options.from_disk,
    )


def expert_override(header: GGUFHeader, n: int) -> tuple[str, int] | None:
    """Return the header value that makes a token use `n` experts; None when it does so anyway (or `n` is 0).

    llama.cpp aborts the process on a number that the model does not allow, and ignores an override of a number that
    is set per layer (llama_model_base::load_hparams, llama_model_loader::get_key_or_arr).

    Raises:
        UsageError: not a mixture of experts, the number is set per layer, or `n` is out of range.
    """
    if n == 0:
        return None
    n_expert, trained = header.number("expert_count"), header.number(_EXPERTS_USED)
    if n_expert < 2 or not trained:
        raise UsageError(
            f"{header.path.name} is not a mixture-of-experts model, so the number of experts cannot be set.",
            "Leave out --experts, or set it to 0.",
        )
    if isinstance(header.value(_EXPERTS_USED), LazyArray):
        raise UsageError(
            f"{header.path.name} sets the number of experts per layer, which cannot be changed.",
            "Leave out --experts, or set it to 0.",
        )
    most = _selectable_experts(header, n_expert)
    if not 1 <= n <= most:
        raise UsageError(
            f"Cannot use {n} experts per token: this model has {most} to choose from.",
            f"Choose 1 to {most} (trained with {trained}), or 0 for the default.",
        )
    return None if n == trained else (f"{header.architecture}.{_EXPERTS_USED}", n)


def _selectable_experts(header: GGUFHeader, n_expert: int) -> int:
    """Return how many experts a token can use: with expert groups, only those of the chosen groups."""
    groups, used = header.number("expert_group_count"), header.number("expert_group_used_count")
    return n_expert // groups * used if groups > 1 and 0 < used < groups else n_expert


def _expert_note(n: int, trained: int) -> str:
    if n < trained:
        return f"Using {n} experts per token instead of {trained}: faster, at lower quality."
    return f"Using {n} experts per token instead of {trained}: slower, and hardly better."


def check_numbers(options: LoadOptions) -> None:
    """Check ranges. Raises UsageError for a number out of range."""

    def within(name: str, value: int, least: int, most: int, also: str = "") -> None:
        if not least <= value <= most:
            raise UsageError(f"{name} must be between {least} and {most}, not {value}.", also)

    if options.n_ctx:
        within("The context size", options.n_ctx, MIN_CTX, _MAX_CTX, "Use 0 to choose it automatically.")
    within("The batch size", options.n_batch, 1, _MAX_BATCH)
    within("The physical batch size (ubatch)", options.n_ubatch, 1, _MAX_BATCH)
    if options.n_ubatch > options.n_batch:
        raise UsageError(
            f"The physical batch size (ubatch) {options.n_ubatch} is larger than the batch size {options.n_batch}.",
            "Use at most the batch size.",
        )
    within("poll", options.poll, 0, 100)


def check_cache_types(header: GGUFHeader, options: LoadOptions) -> None:
    """Check KV cache types. Raises UsageError for those that this model or the flash attention setting forbids."""
    for name, wanted in (("K", options.type_k), ("V", options.type_v)):
        if wanted not in _CACHE_TYPES:
            raise UsageError(f"Unknown {name} cache type {wanted}.", f"Choose one of {', '.join(_CACHE_TYPES)}.")
    if options.flash_attn not in _FLASH:
        raise UsageError(f"Unknown flash attention mode {options.flash_attn}.", f"Choose one of {', '.join(_FLASH)}.")
    block_v = bindings.blck_size(_CACHE_TYPES[options.type_v])
    if block_v > 1 and options.flash_attn == "off":
        raise UsageError(
            f"A quantized V cache ({options.type_v}) needs flash attention, which is off.",
            "Set flash attention to auto, or the V cache type to f16.",
        )
    for name, wanted, head in (
        ("K", options.type_k, header.key_length),
        ("V", options.type_v, header.value_length),
    ):
        block = bindings.blck_size(_CACHE_TYPES[wanted])
        if head and head % block:
            raise UsageError(
                f"The {name} cache type {wanted} has blocks of {block} values, which do not divide this model's head "
                f"size of {head}.",
                f"Set the {name} cache type to f16.",
            )
    if header.number("attention.key_length_mla") and options.type_k != options.type_v:
        raise UsageError(
            f"This model needs the same type for K and V, not {options.type_k} and {options.type_v}.",
            "Set both cache types to the same one.",
        )


def _check_lock(size: int) -> None:
    """Check the limit on locked memory. Raises UsageError when `size` bytes exceed it."""
    try:
        import resource
    except ImportError:  # no such limit on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        soft = hard
    if soft in (resource.RLIM_INFINITY, -1) or soft >= size or _may_lock_all():
        return
    raise UsageError(
        f"Memory locking (mlock) needs {size / 1e9:.1f} GB, but the limit is {soft / 1e9:.3f} GB.",
        "Raise the limit (`ulimit -l unlimited`) or turn memory locking off.",
    )


def _may_lock_all() -> bool:
    """Return whether CAP_IPC_LOCK (bit 14 of the effective capabilities) lifts the limit."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    capabilities = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(capabilities, 16) >> 14 & 1)
