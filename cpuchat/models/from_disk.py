"""Models larger than memory, on request (`LoadOptions.from_disk`): the system reads their mapped weights from disk, and
drops them again, in every pass.

llama.cpp maps a file with MAP_POPULATE and MADV_WILLNEED, which nothing in its API turns off (llama_mmap in
llama-mmap.cpp: only llama_numa_init on several NUMA nodes, or tensors that an architecture marks as lazy). So a load
reads the whole file, up to twice, inside a call that a cancel has to wait for: as long as two tokens of a dense model.
"""

from __future__ import annotations

import msgspec

from cpuchat.errors import UsageError
from cpuchat.models.fit import GB, MemoryNeed, gigabytes, may_stay_on_disk, plan_memory
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.traffic import traffic_of
from cpuchat.protocol import LoadOptions
from cpuchat.telemetry.traffic import pass_bytes


def where_needed(header: GGUFHeader, options: LoadOptions, available: int) -> LoadOptions:
    """Return the options with `from_disk` only if the model does not fit into `available` bytes without it.

    Raises:
        UsageError: other options contradict it.
    """
    if not options.from_disk:
        return options
    if not may_stay_on_disk(options):
        raise UsageError(
            "Weights that stay on disk (--from-disk) are neither locked in memory, read into it, nor on RPC workers.",
            "Turn off --mlock, set --load-mode to mmap, and leave out --rpc; or leave out --from-disk.",
        )
    in_memory = msgspec.structs.replace(options, from_disk=False)
    fits = plan_memory(header, in_memory, available)[0].least <= available
    return in_memory if fits else options


def slowness(header: GGUFHeader, need: MemoryNeed, available: int, rate: float | None, n_experts: int = 0) -> str:
    """Return how slow such a model will be, as a note for the user.

    What of a token's weights stays in memory is taken to be the share that fits. Of a mixture of experts, only those
    that a token uses count.

    Args:
        rate: bytes per second of the disk; None if it is not known.
        n_experts: that a token uses; 0 for as many as trained.
    """
    missing = 1 - min(max(available - need.least, 0) / max(header.size, 1), 1)
    used = round(pass_bytes(traffic_of(header, n_experts=n_experts), 1, 0))
    read = f"{gigabytes(round(missing * used))} of {gigabytes(used)} GB are read from disk for each token"
    if rate is None:
        return f"Larger than memory: {read}."
    seconds = missing * used / rate
    return f"Larger than memory: about {seconds:.2g} s per token, as {read} at {rate / GB:.2g} GB/s."
