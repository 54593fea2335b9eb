"""The memory that this machine offers a model, and what passes cost here. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cpuchat.costmodel.passes import compute_ceiling
from cpuchat.costmodel.profile import CostProfile
from cpuchat.costmodel.usual import cpu_of, usual, usual_profile
from cpuchat.errors import CpuchatError, ModelUnsupported, UsageError
from cpuchat.models.costs import CostLog
from cpuchat.models.fit import PROCESS_BYTES, check_fit, plan_memory, required_memory
from cpuchat.models.gguf.header import read_model
from cpuchat.models.work import N_PAST, model_work
from cpuchat.telemetry.units import gigabytes

if TYPE_CHECKING:
    from cpuchat.hardware.numa.mempolicy import Policy
    from cpuchat.hardware.topology import Topology
    from cpuchat.protocol import LoadOptions, ModelInfo
    from cpuchat.settings import Settings
    from cpuchat.telemetry.machine import Peak

NOT_PROBED = "rough until passes are measured: `cpuchat probe`, or m on F12 in the app (under 40 s)"
NOT_MEASURED = "read bandwidth not measured; run `cpuchat probe`, or press F12 in the app"
DISTURBED = "read bandwidth measured while other programs ran; run `cpuchat probe` on an idle machine"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes, `peak` read bandwidth in bytes per second (0: not measured, and `peak_source` says what to do).

    `available` is what a model may take, `total` what there is. `profile` is what passes cost on the cores in use, and
    `source` what that rests on; None where the bandwidth is not known. `cache_bytes` are the L3 caches of these cores
    (0: not known). `fitted`: the profile follows measured passes, not what is usual of such cores; `probed`: those of a
    probe are among them.
    """

    available: int
    total: int
    peak: float = 0.0
    peak_source: str = ""
    profile: CostProfile | None = None
    source: str = ""
    fitted: bool = False
    probed: bool = False
    cache_bytes: int = 0


def this_machine(
    settings: Settings, *, peak: Peak | None = None, loaded: ModelInfo | None = None, root: Path = Path("/")
) -> Machine:
    """Read the machine as it is now, with the cores and the memory policy of the settings.

    A few milliseconds; up to a second after new measurements, to which its profile is fitted then.

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
    profile, source, probed = None, "", False
    if peak is not None and cpus and policy is not None:
        log = CostLog(cpus, policy.words, root)
        profile, source = log.profile(usual_here(cpus, peak.bytes_per_s, root))
        probed = bool(log.read().probe)
    return Machine(
        available=min((available if bound is None else min(bound, available)) + freed, total),
        total=total,
        peak=peak.bytes_per_s if peak is not None else 0.0,
        peak_source=peak.source if peak is not None else problem or NOT_MEASURED,
        profile=profile,
        source=source or (_usual_source(peak) if peak is not None else ""),
        fitted=bool(source),
        probed=probed,
        cache_bytes=topology.l3_bytes(cpus),
    )


def _usual_source(peak: Peak) -> str:
    share = usual().decode["here"].value
    return f"{100 * share:.0f} % of {gigabytes(peak.bytes_per_s)}, {peak.source}; passes not measured"


def usual_here(cpus: Sequence[int], bandwidth: float, root: Path = Path("/")) -> CostProfile:
    """Return what passes cost on usual cores of this kind that read `bandwidth` bytes per second together."""
    from cpuchat.hardware.instructions import instructions
    from cpuchat.hardware.topology import read_topology

    topology = read_topology(root)
    return usual_profile(
        cpu_of(instructions(root).features),
        len(cpus),
        usual().decode["here"].value * bandwidth,
        # The caches of a virtual machine may be those of its neighbors.
        l3_bytes=0 if topology.virtual else topology.l3_bytes(cpus),
    )


def compute_rate(model: ModelInfo, memory: str = "") -> float:
    """Return the tok/s of a loaded model if only computing took time, in passes as long as micro-batches, by the cost
    model; 0 before a probe of its cores.

    Args:
        memory: the worker's memory policy, in the words of `mempolicy`.
    """
    from cpuchat.hardware.bandwidth.peaks import known_peak

    log, peak = CostLog(model.cpus, memory), known_peak(model.cpus, memory, disturbed=False)
    if peak is None or not log.read().probe:
        return 0.0
    try:
        work = model_work(read_model(Path(model.path)), n_experts=model.n_expert_used)
    except CpuchatError:  # its file no longer exists
        return 0.0
    profile, _ = log.profile(usual_here(model.cpus, peak.bytes_per_s))
    return compute_ceiling(profile, work, N_PAST)


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
