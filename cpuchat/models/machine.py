"""The memory and the read bandwidth that this machine offers a model. Measures nothing."""

from __future__ import annotations

import bisect
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cpuchat.errors import CpuchatError, ModelUnsupported, UsageError
from cpuchat.models.fit import PROCESS_BYTES, check_fit, plan_memory, required_memory
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.usage import UsageLog, Utilization

if TYPE_CHECKING:
    from cpuchat.hardware.numa.mempolicy import Policy
    from cpuchat.hardware.topology import Topology
    from cpuchat.protocol import LoadOptions, ModelInfo
    from cpuchat.settings import Settings
    from cpuchat.telemetry.machine import Peak

ASSUMED_UTILIZATION = 0.7
"""Share of the read bandwidth that plain decoding reaches, until measured here. Good engines reach 55 to 75 % of the
theoretical peak; on two Zen 4 cores it was 70 % of the measured bandwidth with Q4_K_M, 79 % with Q8_0, 92 % with F16
(benchmarks/README.md)."""
MIN_UTILIZATION = ASSUMED_UTILIZATION / 2
"""Lower limit of a utilization: anything less was measured beside other load, or with a model that is not
memory-bound.
"""
SIZE_CLASSES = (1e9, 4e9)
"""Limits of size classes in bytes per token. The fixed cost of a pass weighs more in small models, so they say nothing
about large ones.
"""

NOT_MEASURED = "read bandwidth not measured; run `cpuchat probe`, or press F12 in the app"
DISTURBED = "read bandwidth measured while other programs ran; run `cpuchat probe` on an idle machine"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes, `peak` read bandwidth in bytes per second (0: not measured, and `peak_source` says what to do).

    `available` is what a model may take, `total` what there is. `utilizations` are the measured shares of `peak` that
    plain decoding reached; `utilization` and its source are for models of a size of which none was measured.
    `cache_bytes` are the L3 caches of the cores in use (0: not known): weights that stay in them are not read from
    memory.
    """

    available: int
    total: int
    peak: float = 0.0
    peak_source: str = ""
    utilization: float = ASSUMED_UTILIZATION
    utilization_source: str = "assumed"
    utilizations: tuple[Utilization, ...] = ()
    cache_bytes: int = 0

    def utilization_of(self, quantization: str, per_token: float) -> tuple[float, str]:
        """Return the share of `peak` for models of a quantization that read about `per_token` bytes, and its source."""
        size = bisect.bisect(SIZE_CLASSES, per_token)
        near = [one for one in self.utilizations if bisect.bisect(SIZE_CLASSES, one.per_token) == size]
        if not near:
            return self.utilization, self.utilization_source
        same = [one.share for one in near if one.quantization == quantization]
        share = statistics.median(same or [one.share for one in near])
        return max(
            share, MIN_UTILIZATION
        ), f"as measured here with {f'{quantization} ' if same else ''}models of this size"


def this_machine(
    settings: Settings, *, peak: Peak | None = None, loaded: ModelInfo | None = None, root: Path = Path("/")
) -> Machine:
    """Read the machine as it is now, with the cores and the memory policy of the settings. A few milliseconds.

    Args:
        peak: the read bandwidth, if known already.
        loaded: a model to be counted as unloaded; its header is read.
        root: replaces `/` in tests.
    """
    from cpuchat.hardware.memory import available_bytes, available_on, total_bytes
    from cpuchat.hardware.topology import read_topology

    topology = read_topology(root)
    cpus, policy, problem = _place(settings, topology)
    if peak is None and policy is not None:
        from cpuchat.hardware.bandwidth.peaks import known_peak

        peak = known_peak(cpus, policy.words, root=root)
        if peak is not None and known_peak(cpus, policy.words, root=root, disturbed=False) is None:
            # A busy machine can deliver a tenth of its bandwidth: a prediction from that would stay wrong.
            peak, problem = None, DISTURBED
    total, available = total_bytes(root), available_bytes(root)
    # The kernel kills a process that wants more than the nodes it is bound to have.
    bound = available_on(policy.nodes, root) if policy is not None and policy.mode == "bind" else None
    freed = unloaded_bytes(loaded, settings.load_options()) if loaded is not None else 0
    return Machine(
        available=min((available if bound is None else min(bound, available)) + freed, total),
        total=total,
        peak=peak.bytes_per_s if peak is not None else 0.0,
        peak_source=peak.source if peak is not None else problem or NOT_MEASURED,
        utilizations=tuple(UsageLog().read().utilizations()),
        cache_bytes=topology.l3_bytes(cpus),
    )


def require_loadable(path: Path, settings: Settings, loaded: ModelInfo | None = None) -> None:
    """Check by its header that `path` can be loaded in the place of `loaded`, before that is unloaded.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported, DoesNotFit: it cannot.
    """
    header, options = read_model(path), settings.load_options()
    if header.is_projector or not header.tensors:
        what = "a multimodal projector" if header.is_projector else "a vocabulary without weights"
        raise ModelUnsupported(f"{path.name} is {what}.", "Choose a language model.")
    available = this_machine(settings, loaded=loaded).available
    check_fit(plan_memory(header, options, available)[0], available, header, options)


def unloaded_bytes(loaded: ModelInfo, options: LoadOptions) -> int:
    """Return the bytes that become available when `loaded`, with these options, is unloaded and its process stays.

    Not the pages of its file: the system counts those as available while they are in use, unless they are locked.
    """
    try:
        need = required_memory(read_model(Path(loaded.path)), options, loaded.n_ctx)
    except CpuchatError:  # its file no longer exists
        return loaded.kv_size
    private = need.repack + need.kv + need.compute - PROCESS_BYTES
    return private if options.load_mode == "mmap" and not options.mlock else private + need.weights - need.reclaimable


def _place(settings: Settings, topology: Topology) -> tuple[tuple[int, ...], Policy | None, str]:
    """Return the CPUs that would compute and the memory policy, or what is wrong with the settings."""
    from cpuchat.hardware.placement.placement import PlacementSpec, place

    try:
        placement = place(topology, PlacementSpec.of(settings))
        return placement.cpus, placement.memory, ""
    except UsageError as error:
        return (), None, str(error)
