"""Tests the writer, read back by the reference implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np

from cpuchat.models.synthetic.model import TensorSource, from_array, write_gguf

VALUES: dict[str, Any] = {
    "general.architecture": "llama",
    "a.bool": True,
    "a.small": 7,
    "a.large": 1 << 40,
    "a.negative": -3,
    "a.factor": 0.5,
    "a.text": "Grüße\n",
    "a.strings": ["x", "", "ü"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.5, 1, 2.5],
    "a.array": np.arange(4, dtype=np.float32),
}


def test_values_and_tensors_come_back(tmp_path: Path) -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    half = np.arange(6, dtype=np.float16).reshape(2, 3)
    chunked = TensorSource("chunked", (8, 2), "F32", lambda: (np.full(4, i, np.float32) for i in range(4)))
    path = write_gguf(
        tmp_path / "sub" / "m.gguf", VALUES, [from_array("a", matrix), from_array("b", half, "F16"), chunked]
    )
    reader = reference.GGUFReader(path)
    for key, value in VALUES.items():
        assert reader.fields[key].contents() == (value.tolist() if isinstance(value, np.ndarray) else value), key
    read = {t.name: t.data for t in reader.tensors}
    np.testing.assert_array_equal(read["a"], matrix)
    np.testing.assert_array_equal(read["b"], half)
    np.testing.assert_array_equal(read["chunked"].reshape(-1), np.repeat(np.arange(4, dtype=np.float32), 4))
