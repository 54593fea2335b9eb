"""What llama.cpp reads in one pass, tensor by tensor: the judge of the estimate in cpuchat.models.traffic.

llama_context_params.cb_eval is called with every node of the graph after it was computed. Its sources that are weights
or parts of a cache are counted: whole, or of those that are looked up (GET_ROWS, MUL_MAT_ID, ADD_ID) the rows that
were, and of the KV cache of flash attention the cells that the mask leaves, because only those are read
(ggml_compute_forward_flash_attn_ext_f16_one_chunk in ggml-cpu/ops.cpp).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np

from tests.models.llama import keep, log


class Tensor(ctypes.Structure):
    """struct ggml_tensor of ggml.h (ggml 0.25.3)."""


Tensor._fields_ = [
    ("type", c_int32),
    ("buffer", c_void_p),
    ("ne", c_int64 * 4),
    ("nb", c_size_t * 4),
    ("op", c_int32),
    ("op_params", c_int32 * 16),
    ("flags", c_int32),
    ("src", POINTER(Tensor) * 10),
    ("view_src", POINTER(Tensor)),
    ("view_offs", c_size_t),
    ("data", c_void_p),
    ("name", c_char * 64),
    ("extra", c_void_p),
    ("padding", c_char * 8),
]
_LIB: Any = llama.llama_cpp._lib
_LIB.ggml_op_name.restype = ctypes.c_char_p
_LIB.ggml_op_name.argtypes = [c_int32]
_LIB.ggml_nbytes.restype = c_size_t
_LIB.ggml_nbytes.argtypes = [POINTER(Tensor)]
_LIB.ggml_row_size.restype = c_size_t
_LIB.ggml_row_size.argtypes = [c_int32, c_int64]

_NO_READS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
_CACHES = ("cache_k", "cache_v", "cache_r", "cache_s")


@dataclass
class Reads:
    """Bytes of one pass: tensors of the model by name, the KV cache, the recurrent state (read and written)."""

    weights: dict[str, int] = field(default_factory=dict)
    kv: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + self.kv + self.state


def _root(tensor: Any) -> Any:
    while tensor.view_src:
        tensor = tensor.view_src.contents
    return tensor


def _name(tensor: Any) -> str:
    return tensor.name.decode()


def _elements(tensor: Any) -> int:
    return int(np.prod(list(tensor.ne)))


def _bytes(tensor: Any) -> int:
    """Bytes of the values themselves, without what strides skip."""
    return _LIB.ggml_row_size(tensor.type, tensor.ne[0]) * _elements(tensor) // max(tensor.ne[0], 1)


def _indices(tensor: Any) -> set[int]:
    """Different values of a tensor of I32, which may be a view with strides."""
    found: set[int] = set()
    for i2 in range(tensor.ne[2]):
        for i1 in range(tensor.ne[1]):
            at = tensor.data + i1 * tensor.nb[1] + i2 * tensor.nb[2]
            found.update((c_int32 * tensor.ne[0]).from_address(at))
    return found


def _cells(mask: Any) -> int:
    """Cells that the mask (F16: cells x tokens) leaves to at least one token."""
    raw = (ctypes.c_uint16 * (mask.ne[0] * mask.ne[1])).from_address(mask.data)
    values = np.frombuffer(raw, np.float16).reshape(mask.ne[1], mask.ne[0])
    return int((values > -np.inf).any(axis=0).sum())


class Recorder:
    """Counts what the nodes of a graph read into `reads` while it is `active`."""

    def __init__(self) -> None:
        self.reads = Reads()
        self.active = False
        self.callback = llama.ggml_backend_sched_eval_callback(self._called)

    def _called(self, address: int, ask: bool, _user: Any) -> bool:
        """`ask`: before a node is computed, whether it is to be shown after that."""
        if ask:
            return self.active
        if address:
            node = Tensor.from_address(address)
            op = _LIB.ggml_op_name(node.op).decode()
            if op not in _NO_READS:
                self._node(node, op)
        return True

    def _node(self, node: Any, op: str) -> None:
        sources = [node.src[i].contents if node.src[i] else None for i in range(10)]
        written = _root(node)
        if _name(written).startswith(("cache_r", "cache_s")):
            self.reads.state += _bytes(sources[0] if op in ("SET_ROWS", "CPY") else node)
        for i, source in enumerate(sources):
            if source is None or (op in ("CPY", "SET_ROWS") and _root(source).data == written.data):
                continue
            root = _root(source)
            name = _name(root)
            if name.startswith(_CACHES):
                self._cache(op, i, name, source, sources)
            elif root.op == 0 and name.endswith((".weight", ".bias", ".scale", "ssm_a", "ssm_d", "sinks")):
                self._weight(op, i, name, source, sources)

    def _weight(self, op: str, i: int, name: str, source: Any, sources: list[Any]) -> None:
        key, size = name, _bytes(source)
        if op == "GET_ROWS" and i == 0:
            key, size = f"rows of {name}", source.nb[1] * len(_indices(sources[1]))
        elif op == "MUL_MAT_ID" and i == 0:
            size = source.nb[2] * len(_indices(sources[2]))
        elif op == "ADD_ID" and i == 1:
            size = source.nb[1] * len(_indices(sources[2]))
        self.reads.weights[key] = max(size, self.reads.weights.get(key, 0))

    def _cache(self, op: str, i: int, name: str, source: Any, sources: list[Any]) -> None:
        if name.startswith(("cache_r", "cache_s")):
            if op == "GET_ROWS" and i == 0:
                self.reads.state += source.nb[1] * _elements(sources[1])
            else:
                self.reads.state += _bytes(source)
        elif op == "FLASH_ATTN_EXT":
            if i == 2 and _root(sources[1]).data == _root(source).data:
                return  # latent attention: V is a part of K
            self.reads.kv += _bytes(source) // source.ne[1] * _cells(sources[3])
        else:
            self.reads.kv += _bytes(source)


class Watched:
    """A loaded model that tells what each of its passes reads. `cparams` are fields of llama_context_params."""

    def __init__(self, path: Path, n_ctx: int = 512, *, use_repack: bool = False, n_threads: int = 1, **cparams: int):
        llama.llama_log_set(keep, c_void_p(0))
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.use_extra_bufts = use_repack
        self._model: Any = llama.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError("".join(log)[-2000:])
        self._recorder = Recorder()
        context = llama.llama_context_default_params()
        context.n_ctx = n_ctx
        context.n_threads = context.n_threads_batch = n_threads
        context.cb_eval = self._recorder.callback
        for name, value in cparams.items():
            setattr(context, name, value)
        self._context: Any = llama.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError("".join(log)[-2000:])

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)

    def evaluate(self, tokens: list[int]) -> Reads:
        """Decode these after what was decoded before; what that read."""
        self._recorder.reads, self._recorder.active = Reads(), True
        try:
            self._decode(tokens)
        finally:
            self._recorder.active = False
        return self._recorder.reads

    def fill(self, n: int) -> None:
        """Put `n` tokens into the context."""
        for start in range(0, n, 256):
            self._decode([10 + i % 50 for i in range(start, min(n, start + 256))])

    def _decode(self, tokens: list[int]) -> None:
        """With logits for every token, as a verify pass has them."""
        n = len(tokens)
        ids, outputs = (c_int32 * n)(*tokens), (ctypes.c_int8 * n)(*[1] * n)
        batch = llama.llama_batch_get_one(ids, n)
        batch.logits = outputs
        if llama.llama_decode(self._context, batch):
            raise RuntimeError("".join(log)[-2000:])
