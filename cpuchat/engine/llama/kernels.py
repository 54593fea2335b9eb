"""Chooses between cpuchat's kernels and llama.cpp's for a load, by measuring both where that was not done before."""

from __future__ import annotations

import ctypes
import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final

from cpuchat.costs.model import ProductRate
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.threads import CpuWait, ThreadPool
from cpuchat.hardware.memory import available_bytes
from cpuchat.hardware.topology import read_topology
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.kernels import TYPES, MeasuredProducts, ProductLog, chosen_by, instructions_used
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.timings import MAX_CPU_WAIT

TOKENS: Final = (1, 4, 8, 64)
_SECONDS: Final = 0.4
"""Of rounds for each type; making the matrices takes as long again."""
_MUCH: Final = 128 << 20
"""Bytes of a type from which it is measured: of less, caches hold a large part, and reading it takes a few ms."""
_COMPARED: Final = (1, 8)
_ROOM: Final = 1 << 30  # bytes of free memory
_MIN_BYTES, _MAX_BYTES = 64 << 20, 128 << 20  # of matrices to measure with, for each of the kernels


def select(types: Collection[str]) -> None:
    """Let later loads in this process use cpuchat's kernels for these tensor types."""
    if bindings.kernels_library is not None:
        bits = sum(1 << number for number, kind in enumerate(TYPES) if kind in types)
        bindings.kernels_library.cpuchat_kernels_select(bits)


def refusal() -> str:
    """Return why a library that is installed is not used; "" where it is, and where there is none for this CPU."""
    if bindings.kernels_library is not None or not instructions_used(engine_cpu()):
        return ""
    return (
        "cpuchat's kernels were built for another engine or another cpuchat, so llama.cpp's compute. Reinstall "
        "llama-cpp-python and cpuchat together."
    )


def prepare(cpus: Sequence[int], n_threads: int, is_mapped: bool) -> None:
    """Tell them before a load which CPUs will compute, so that each thread lays out, and first touches, the weights
    that it will read; and whether these come from a mapped file, whose pages are then given back. `cpus` may be more
    than threads."""
    if bindings.kernels_library is not None:
        numbers = (ctypes.c_int * len(cpus))(*cpus)
        bindings.kernels_library.cpuchat_kernels_prepare(numbers, len(cpus), n_threads, is_mapped)


def choose(
    header: GGUFHeader,
    options: LoadOptions,
    threads: tuple[int, ...] | ThreadPool,
    tell: Callable[[int, int], None],
    abort: AbortFlag,
) -> tuple[frozenset[str], list[str]]:
    """Return the tensor types that a load of a model should use cpuchat's kernels for, and notes for the user. Types of
    which the model has much are measured on these threads once, in up to a second each; `tell` gets how many are, and
    of how many."""
    is_wanted = options.kernels == "auto" and options.use_repack
    if bindings.kernels_library is None or not is_wanted:
        return frozenset(), []
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        if len(tensor.shape) > 1 and tensor.type in TYPES:
            sizes[tensor.type] += tensor.nbytes
    cpus = threads.cpus if isinstance(threads, ThreadPool) else threads
    log = ProductLog(cpus)
    known = log.read()
    due = [kind for kind, size in sizes.items() if size >= _MUCH and (kind not in known or known[kind].is_due)]
    due = due if available_bytes() >= _ROOM else []
    found: dict[str, MeasuredProducts] = {}
    if due:
        pool = threads if isinstance(threads, ThreadPool) else ThreadPool(threads, options.poll)
        try:
            for number, kind in enumerate(due):
                tell(number, len(due))
                if not abort.is_set() and (measured := measure(kind, pool)):
                    found[kind] = measured
        finally:
            if pool is not threads:
                pool.free()
    log.put(found)
    products = log.read() | found  # which may be all there is, where nothing can be saved
    wrong = [kind for kind in sizes if (products[kind].is_wrong if kind in products else _differs(kind, cpus[0]))]
    notes = [
        f"cpuchat's kernels of {kind} weights differ from llama.cpp's on this CPU, so llama.cpp's are used."
        for kind in wrong
    ]
    return chosen_by(products).difference(wrong), notes


@functools.cache
def _differs(kind: str, cpu: int) -> bool:
    """Return whether the products of a tensor type differ from llama.cpp's; it takes some ms."""
    pool = ThreadPool((cpu,), 0)
    try:
        found = measure(kind, pool, _COMPARED, seconds=0.0)
    finally:
        pool.free()
    return found is not None and found.is_wrong


def measure(
    kind: str, pool: ThreadPool, tokens: Sequence[int] = TOKENS, seconds: float = _SECONDS
) -> MeasuredProducts | None:
    """Time the products of a tensor type with both kernels in turn, for about `seconds` (0: only compare them), and
    compare the results. None where cpuchat has no kernels for it, or memory is short. `tokens`: of the passes, rising.
    Passes read four times what L3 holds, within 64 and 128 MiB: where L3 is larger, rates may be above memory's."""
    if bindings.kernels_library is None or kind not in TYPES:
        return None
    select(TYPES)
    prepare(pool.cpus, pool.n_active, is_mapped=False)
    n_bytes = min(max(_MIN_BYTES, 4 * read_topology(allowed=pool.cpus).l3_bytes(pool.cpus)), _MAX_BYTES)
    n = len(tokens)
    found = (ctypes.c_double * (2 * n + 1))()
    waits = CpuWait(pool.n_active)
    failed = bindings.kernels_library.cpuchat_kernels_measure(
        kind.encode(), ctypes.c_void_p(pool.threads.address), pool.n_active, ctypes.c_size_t(n_bytes if seconds else 0),
        ctypes.c_double(seconds), (ctypes.c_int * n)(*tokens), n, found,
    )  # fmt: skip
    if failed:
        return None
    share = waits.share()
    ours, theirs = (tuple(zip(map(float, tokens), rates, strict=True)) for rates in (found[:n], found[n : 2 * n]))
    return MeasuredProducts(
        cpuchat=ProductRate(kind, ours),
        llama_cpp=ProductRate(kind, theirs),
        difference=found[2 * n],
        disturbed=(share or 0.0) > MAX_CPU_WAIT,
        made=time.time(),
    )
