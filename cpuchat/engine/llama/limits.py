"""The limits of a model on this machine: memory, bytes read per pass, and the read bandwidth of the cores in use."""

from __future__ import annotations

import msgspec

from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.file_reading import Progress
from cpuchat.engine.llama.model import Model
from cpuchat.errors import Interrupted
from cpuchat.hardware.bandwidth.peaks import known_peak, peak_of, should_measure
from cpuchat.hardware.memory import available_bytes, available_on
from cpuchat.hardware.numa.mempolicy import allowed_nodes, current
from cpuchat.hardware.topology import read_topology
from cpuchat.model_info import ModelInfo, Traffic
from cpuchat.models.traffic import traffic_of


def available_for_model() -> int:
    """Return the bytes available for a model: at most the free memory of the nodes that this process is bound to.

    The OOM killer ends a process that needs more than its nodes have, however much there is on others.
    """
    policy = current()
    bound = policy.nodes if policy is not None and policy.mode == "bind" else allowed_nodes()
    on_nodes, anywhere = available_on(bound), available_bytes()
    return anywhere if on_nodes is None else min(on_nodes, anywhere)


def traffic(model: Model) -> Traffic:
    """Return what a pass of `model` reads, with its KV cache types and number of experts as loaded."""
    options = model.options
    return traffic_of(
        model.header,
        type_k=options.type_k,
        type_v=options.type_v,
        n_experts=model.plan.experts[1] if model.plan.experts else 0,
        flash_attn=options.flash_attn != "off",
    )


def describe_with_limits(model: Model, on_progress: Progress, abort: AbortFlag) -> ModelInfo:
    """Return the model's info with its traffic and the read bandwidth of its cores and its draft model's.

    Call it after the draft model is loaded, which may have its own cores. The bandwidth is looked up, or measured if
    the options ask for it (phase "probing", about 2 seconds).

    Raises:
        Interrupted: `abort` was set meanwhile.
    """
    info, notes = model.info, []
    cpus = info.compute_cpus
    peak = known_peak(cpus)
    if model.options.probe and should_measure(cpus):
        on_progress("probing", 0, 1)
        peak = peak_of(cpus, cancelled=abort.is_set, failed=notes.append)
        on_progress("probing", 1, 1)
        if abort.is_set():
            raise Interrupted("The load was cancelled.")
        notes = [f"The read bandwidth was not measured: {reason}" for reason in notes]
        if known_peak(cpus, disturbed=False) is None and peak is not None:
            notes = ["Other programs disturbed the bandwidth measurement; it will be repeated later."]
    return msgspec.structs.replace(
        info,
        notes=(*info.notes, *notes),
        traffic=traffic(model),
        peak_read=peak.bytes_per_s if peak is not None else 0.0,
        # The calling thread is pinned, so its own affinity says nothing.
        cache_bytes=read_topology(allowed=cpus).l3_bytes(cpus),
    )
