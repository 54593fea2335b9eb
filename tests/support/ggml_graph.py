"""Tensors of ggml and what is computed with them: matrices of weights lie in cpuchat's buffer type, as after a load."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager

import gguf
import numpy as np

from cpuchat.engine.llama import bindings, kernels
from cpuchat.hardware.sysfs import own_cpus

_F32, _I32 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.I32
_IS_HADAMARD = 1
_FIRST_BYTES = 1 << 24


class _InitParams(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _call(name: str, *arguments: object) -> int:
    """Call a function of ggml that returns a pointer, or nothing. Numbers among the arguments are pointers."""
    function = bindings._function(name, ctypes.c_void_p, library=bindings._cpu)
    function.argtypes = None
    return function(*(ctypes.c_void_p(one) if isinstance(one, int) else one for one in arguments)) or 0


def _cpuchat_buffer_type() -> int:
    """Return the buffer type that is asked first."""
    vector = _call("_Z39ggml_backend_cpu_get_extra_buffer_typesv")
    return ctypes.c_void_p.from_address(ctypes.c_void_p.from_address(vector).value or 0).value or 0


def _tensor(context: int, kind: int, shape: tuple[int, ...]) -> int:
    """Return a new tensor of one to three dimensions; the last axis is ggml's first."""
    sizes = map(ctypes.c_int64, (*shape[::-1], 1, 1)[:3])
    return _call("ggml_new_tensor_3d", context, ctypes.c_int(kind), *sizes)


class Graph:
    """Numbers are addresses of tensors."""

    def __init__(self) -> None:
        self._here, self._elsewhere = (
            _call("ggml_init", _InitParams(_FIRST_BYTES, None, no_alloc)) for no_alloc in (False, True)
        )
        self._buffers: list[int] = []

    def weights(self, kind: str, raw: np.ndarray, n_values: int) -> int:
        """Return a matrix of quantized rows, or several of one size, laid out for cpuchat's kernels."""
        kernels.prepare(own_cpus()[:1], 1, is_mapped=False)  # a load before it may have been of a file, whose pages go
        tensor = _tensor(self._elsewhere, gguf.GGMLQuantizationType[kind], (*raw.shape[:-1], n_values))
        kinds = _cpuchat_buffer_type()
        n_bytes = ctypes.c_size_t(_call("ggml_backend_buft_get_alloc_size", kinds, tensor))
        self._buffers.append(buffer := _call("ggml_backend_buft_alloc_buffer", kinds, n_bytes))
        _call("ggml_backend_tensor_alloc", buffer, tensor, _call("ggml_backend_buffer_get_base", buffer))
        _call("ggml_backend_tensor_set", tensor, raw.ctypes.data, ctypes.c_size_t(0), ctypes.c_size_t(raw.nbytes))
        return tensor

    def floats(self, values: np.ndarray) -> int:
        return self._numbers(np.ascontiguousarray(values, np.float32), _F32)

    def _numbers(self, values: np.ndarray, kind: int) -> int:
        tensor = _tensor(self._here, kind, values.shape)
        ctypes.memmove(_call("ggml_get_data", tensor), values.ctypes.data, values.nbytes)
        return tensor

    def columns(self, tensor: int, shape: tuple[int, int], first: int, n: int) -> int:
        """Return `n` columns from `first` on of a tensor of floats with this shape: a view, whose rows lie apart."""
        size = ctypes.c_int64(n), ctypes.c_int64(shape[0])
        apart, offset = ctypes.c_size_t(4 * shape[1]), ctypes.c_size_t(4 * first)
        return _call("ggml_view_2d", self._here, tensor, *size, apart, offset)

    def product(self, weights: int, x: int, *, is_rotation: bool = False) -> int:
        tensor = _call("ggml_mul_mat", self._here, weights, x)
        if is_rotation:
            _call("ggml_mul_mat_set_hint", tensor, ctypes.c_int(_IS_HADAMARD))
        return tensor

    def product_of_experts(self, weights: int, x: int, experts: np.ndarray) -> int:
        """Return a row for each of the `experts` (tokens, experts of one), of `x` (tokens, one or as many, values)."""
        numbers = self._numbers(np.ascontiguousarray(experts, np.int32), _I32)
        return _call("ggml_mul_mat_id", self._here, weights, x, numbers)

    def compute(self, result: int, n_threads: int = 1) -> None:
        graph, backend = _call("ggml_new_graph", self._here), _call("ggml_backend_cpu_init")
        _call("ggml_backend_cpu_set_n_threads", backend, ctypes.c_int(n_threads))
        _call("ggml_build_forward_expand", graph, result)
        failed = _call("ggml_backend_graph_compute", backend, graph) & 0xFFFFFFFF
        _call("ggml_backend_free", backend)
        assert not failed

    def values(self, tensor: int, shape: tuple[int, ...]) -> np.ndarray:
        memory = (ctypes.c_float * math.prod(shape)).from_address(_call("ggml_get_data", tensor))
        return np.array(memory, np.float32).reshape(shape)

    def free(self) -> None:
        for buffer in self._buffers:
            _call("ggml_backend_buffer_free", buffer)
        _call("ggml_free", self._here)
        _call("ggml_free", self._elsewhere)


@contextmanager
def ggml_graph() -> Iterator[Graph]:
    graph = Graph()
    try:
        yield graph
    finally:
        graph.free()
