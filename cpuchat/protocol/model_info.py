"""What a loaded model is, the work of its passes, and the engine that it runs on, as a worker or a server tells it."""

from __future__ import annotations

import math

import msgspec

from cpuchat.protocol.reasons import DraftsOff


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The llama.cpp that a worker runs on. `features` are the names that it prints as `= 1`. `module` is the CPU module
    in use ("": it was built for one CPU), `modules` those that are worth timing on this CPU, the highest score first.
    `kernels` is the instruction set of cpuchat's kernels ("AVX2"; "": only llama.cpp's are here).

    `memory_policy` is the NUMA policy that the worker runs under, in the words of hardware.numa.mempolicy ("local",
    "interleave:0-1"); `policy_refused` is why it is not the one that was asked for, "" when it is."""

    version: str
    llama_commit: str = ""
    features: tuple[str, ...] = ()
    module: str = ""
    modules: tuple[str, ...] = ()
    kernels: str = ""
    pid: int = 0
    memory_policy: str = ""
    policy_refused: str = ""


class Weights(msgspec.Struct, frozen=True):
    """The matrices of one tensor `type`: `nbytes` together, and one multiply-add per value and token.

    `activations`: the values that they take in and give out for each token, their rows and columns."""

    type: str
    nbytes: float
    madds: float
    activations: float = 0.0


class Attention(msgspec.Struct, frozen=True):
    """Layers that attend alike. Per token of the context: `nbytes` of KV cache, and `madds` multiply-adds for each
    token of the pass.

    `window`: only over the last tokens (0: all); `step`: in steps of so many tokens (1 with flash attention); `wide`:
    how many times as long the multiply-adds of passes of a tile of tokens take as over an F16 cache."""

    nbytes: float
    madds: float
    window: int = 0
    step: int = 1
    wide: float = 1.0

    def cells(self, n_tokens: float, n_past: float) -> float:
        """Return the tokens of the context that a pass over `n_tokens` tokens reads."""
        cells = n_past + n_tokens
        if self.window:
            cells = min(cells, self.window + n_tokens - 1)
        return -(-cells // self.step) * self.step if self.step > 1 else cells


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a pass of a model: what it reads and computes, as `costs.model.parts` adds it up.

    `dense` and `head` (the output matrix, only for tokens whose logits are wanted) are read whole by every pass; of the
    `experts`, all routed ones together, a token uses `n_expert_used` of `n_expert`. `row`: bytes of tables that each
    token looks up; `on_disk`: of tables that need no memory (`fit.lazy_bytes`); `state`: bytes of recurrent state, read
    and written by each pass. `alike`: share of the tokens of one text that choose the same experts as others of the
    pass, as it were; 0 with random weights."""

    n_layer: int
    dense: tuple[Weights, ...]
    head: tuple[Weights, ...] = ()
    experts: tuple[Weights, ...] = ()
    n_expert: int = 0
    n_expert_used: int = 0
    alike: float = 0.0
    row: int = 0
    on_disk: float = 0.0
    state: int = 0
    attention: tuple[Attention, ...] = ()

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of weights that passes read, all experts included."""
        return sum(one.nbytes for one in (*self.dense, *self.head, *self.experts))

    @property
    def is_moe(self) -> bool:
        return self.n_expert > 0

    @property
    def width(self) -> int:
        """Return the values of a hidden state: the smaller side of the output matrix; 0 where that is not known."""
        area = sum(one.madds for one in self.head)
        sides = sum(one.activations for one in self.head)
        return round((sides - math.sqrt(max(sides * sides - 4 * area, 0.0))) / 2)


class BufferWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one tensor type in one kind of buffer, as llama.cpp names both ("CPU_REPACK", "q4_K"); in bytes."""

    buffer: str
    type: str
    bytes: int

    @property
    def is_repacked(self) -> bool:
        """Whether the weights are laid out for kernels: llama.cpp's, or cpuchat's."""
        return self.is_of_cpuchat or any(name in self.buffer for name in ("REPACK", "AMX"))

    @property
    def is_of_cpuchat(self) -> bool:
        """Whether cpuchat's kernels multiply them."""
        return "CPUCHAT" in self.buffer


class LoadEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a load really did, as read from llama.cpp afterwards.

    `weights` by buffer and type. `load_mode`, `type_k`, `type_v` and `kv_bytes` are those that it logged ("" and 0: it
    logged none). `flash_nodes` and `softmax_nodes` count the attention nodes of its graph. `scalar_types` are types of
    weights whose kernel has no vector instructions here. `thread_ids` are the kernel's IDs of the compute threads."""

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

    `parallel` answers run at once, each with a context of `n_ctx` tokens; others wait. `notes` say why it is 1 where
    more were asked for. `cpus` are the logical CPUs that compute. `peak_read` is the read bandwidth of those
    together in bytes per second (0: not known; `peak_at_least`, `peak_estimated` as of `telemetry.machine.Peak`),
    `cache_bytes` their L3 caches together (0: not known). Kept states of chats take at most `state_memory` of memory,
    one checkpoint `partial_state` (0: none is needed, the KV cache can be cut anywhere). `work` is that of its passes
    over text, `draft_work` the draft model's; None: not known. `takes_effort`: its chat template can be told how much
    to reason. `fills_in`: its vocabulary has the tokens to fill in the middle of a text.

    A model on a server: `server` describes it ("llama-server at 127.0.0.1:8080"; "" for a file on this machine), `path`
    is its address (servers.ServerModel), and 0 stands for what is not known. `unreported` has pairs of a figure and why
    the server does not report it, or how to get it; `ignored` names options of a request that it does not get.

    `evidence` is None for a model on a server."""

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
    parallel: int = 1
    has_template: bool = True
    takes_effort: bool = True
    fills_in: bool = False
    load_ms: float = 0.0
    fingerprint: str = ""
    notes: tuple[str, ...] = ()
    draft: str = ""
    draft_path: str = ""
    draft_quantization: str = ""
    pass_ms: tuple[float, ...] = ()
    drafts_off: DraftsOff | None = None
    peak_read: float = 0.0
    peak_at_least: bool = False
    peak_estimated: bool = False
    cache_bytes: int = 0
    work: ModelWork | None = None
    draft_work: ModelWork | None = None
    state_memory: int = 0
    partial_state: int = 0
    server: str = ""
    unreported: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    evidence: LoadEvidence | None = None
