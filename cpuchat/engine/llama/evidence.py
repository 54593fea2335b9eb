"""What a load really did: where llama.cpp put the weights, how it attends, and which kernels are slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from cpuchat.engine.llama import bindings
from cpuchat.hardware.topology import Instructions
from cpuchat.models import support
from cpuchat.models.engine_version import GRAPH_RESERVED, KV_SIZE, LOAD_MODE, MASK_USER
from cpuchat.protocol.model_info import BufferWeights, LoadEvidence


def read_evidence(model: Any, thread_ids: Sequence[int]) -> LoadEvidence:
    """Return what the load of `model`, whose log is still there, did. `thread_ids` are those of its compute threads."""
    sums = defaultdict[tuple[str, str], int](int)
    for buffer, kind, n_bytes in bindings.weights_of(model):
        sums[buffer, kind] += n_bytes
    found = tuple(
        BufferWeights(buffer=buffer, type=kind, bytes=n_bytes)
        for (buffer, kind), n_bytes in sorted(sums.items(), key=lambda item: -item[1])
    )
    told: dict[str, Any] = {}
    nodes = {"FLASH_ATTN_EXT": 0, "SOFT_MAX": 0}  # of several graphs, those of the last one
    kv_mib, in_graph = 0.0, False
    for line in bindings.log.lines():
        if match := LOAD_MODE.search(line):
            told["load_mode"] = match[1]
        elif match := KV_SIZE.match(line):
            kv_mib += float(match[1])
            told |= {"type_k": match[2], "type_v": match[3]}
        elif match := MASK_USER.search(line):
            if not in_graph:
                nodes, in_graph = dict.fromkeys(nodes, 0), True
            nodes[match[1]] += 1
        elif GRAPH_RESERVED.match(line):
            in_graph = False
    return LoadEvidence(
        weights=found,
        scalar_types=scalar_types({one.type for one in found if not one.is_repacked}),
        thread_ids=tuple(thread_ids),
        kv_bytes=int(kv_mib * (1 << 20)),
        flash_nodes=nodes["FLASH_ATTN_EXT"],
        softmax_nodes=nodes["SOFT_MAX"],
        **told,
    )


def scalar_types(types: Iterable[str]) -> tuple[str, ...]:
    """Return those of these quantized types whose dot product has no vector instructions in this engine."""
    features = frozenset(bindings.engine_info().features)
    known = support.scalar_types(Instructions(features)) if "SSE3" in features else ()
    found: list[str] = []
    for kind in sorted(types):
        # The name ends in the type of the activations (type_traits_cpu in ggml-cpu.c); none: it is not quantized.
        names = (f"ggml_vec_dot_{kind}_{one}" for one in ("q8_0", "q8_1", "q8_K"))
        name = next(filter(bindings.has_function, names), "")
        # arch-fallback.h renames a generic function to the plain name where the architecture has none of its own.
        if name and (not bindings.has_function(f"{name}_generic") or kind.upper() in known):
            found.append(kind)
    return tuple(found)
