"""What a loaded model is, and the engine that it runs on: how a worker or a server describes them."""

from __future__ import annotations

import msgspec


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The llama.cpp that a worker runs on. `features` are the names that it prints as `= 1`.

    `memory` is the NUMA policy that the worker runs under, in the words of hardware.numa.mempolicy ("local",
    "interleave:0-1"); `memory_refused` is why it is not the one that was asked for, "" when it is.
    """

    version: str
    llama_commit: str = ""
    features: tuple[str, ...] = ()
    pid: int = 0
    memory: str = ""
    memory_refused: str = ""


class KVTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose KV cache is read alike: `bytes_per_token` of all of them together, over the last `window` tokens
    (0: over all of them), in steps of `step` tokens (1 with flash attention, which skips what is masked)."""

    bytes_per_token: int
    window: int = 0
    step: int = 1


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that one pass of a model reads from memory (telemetry.traffic computes the sum).

    `weights`: tensors that every pass reads whole; the embedding table only where it is the output matrix too.
    `experts`: all routed experts together, of which each token reads `n_expert_used` of `n_expert`. `row`: what a
    token reads of tables that are looked up by row. `state`: recurrent state, read and written once per pass.
    """

    weights: int
    experts: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    row: int = 0
    state: int = 0
    kv: tuple[KVTraffic, ...] = ()


class BufferWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one tensor type in one kind of buffer, as llama.cpp names both ("CPU_REPACK", "q4_K"); in bytes."""

    buffer: str
    type: str
    n_tensors: int
    bytes: int


class LoadEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a load really did, as read from llama.cpp afterwards.

    `weights` by buffer and type. `load_mode`, `type_k`, `type_v` and `kv_bytes` are those that it logged ("" and 0: it
    logged none). `flash_nodes` and `softmax_nodes` count the attention nodes of its graph. `scalar_types` are types of
    weights whose kernel has no vector instructions here. `thread_ids` are the kernel's IDs of the compute threads.
    """

    weights: tuple[BufferWeights, ...] = ()
    load_mode: str = ""
    type_k: str = ""
    type_v: str = ""
    kv_bytes: int = 0
    flash_nodes: int = 0
    softmax_nodes: int = 0
    scalar_types: tuple[str, ...] = ()
    thread_ids: tuple[int, ...] = ()


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model. Sizes in bytes. `fingerprint` identifies the file's content for caches.

    `cpus` are the logical CPUs that compute. `peak_read` is the measured read bandwidth of those and of the draft
    model's cores together in bytes per second (0: not measured), `cache_bytes` their L3 caches together (0: not known).
    Kept states of chats take at most `state_memory` of memory, one checkpoint `partial_state` (0: none is needed, the
    KV cache can be cut anywhere).

    A model on a server: `server` describes it ("llama-server at 127.0.0.1:8080"; "" for a file on this machine), `path`
    is its address (servers.ServerModel), and 0 stands for what is not known. `unreported` has pairs of a figure and
    why the server does not report it, or how to get it; `ignored` names options of a request that it does not get.

    `engine` names another engine than the worker that answers on this machine ("llama-server"; "" for the worker). RPC
    workers hold the last `rpc_layers` layers. `evidence` is None for a model of another engine.
    """

    path: str
    name: str
    architecture: str
    quantization: str
    n_params: int
    size: int
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_layer: int
    n_threads: int
    cpus: tuple[int, ...] = ()
    kv_size: int = 0
    has_template: bool = True
    load_ms: float = 0.0
    fingerprint: str = ""
    notes: tuple[str, ...] = ()
    n_expert: int = 0
    n_expert_used: int = 0
    draft: str = ""
    draft_path: str = ""
    draft_quantization: str = ""
    draft_cpus: tuple[int, ...] = ()
    pass_ms: tuple[float, ...] = ()
    no_speculation: str = ""
    peak_read: float = 0.0
    cache_bytes: int = 0
    traffic: Traffic | None = None
    draft_traffic: Traffic | None = None
    state_memory: int = 0
    partial_state: int = 0
    server: str = ""
    engine: str = ""
    rpc_layers: int = 0
    unreported: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    evidence: LoadEvidence | None = None

    def why_unreported(self, figure: str) -> str:
        """Return why the server does not report a figure, or how to get it; "" for one that it reports."""
        return dict(self.unreported).get(figure, "")

    @property
    def compute_cpus(self) -> tuple[int, ...]:
        """Return the logical CPUs of both models, ascending: `draft_cpus` may be some of `cpus`, or others."""
        return tuple(sorted({*self.cpus, *self.draft_cpus}))
