"""Generates random weights directly in GGML's formats: nothing is quantized, so gigabytes take seconds.

Every block gets constant scales and random quants; block layouts are those of ggml-common.h, scale packing that of
ggml-quants.c. Two kinds of content: `random_rows` (spread like N(0, std), uniform for the quantised types) and
`sign_rows` (every weight is +size or -size, chosen by a bit), which survive any of these quantisations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any, cast

import numpy as np

from cpuchat.models.gguf.types import BY_NAME

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# The 16 levels of IQ4_NL and of MXFP4 (ggml-common.h: kvalues_iq4nl, kvalues_mxfp4).
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# 6-bit scales of value 1 (Q4_K and Q5_K: scale and min; Q3_K: stored as 33, of which 32 is taken away).
_K4_ONES = bytes([1] * 8 + [0x11] * 4)
_Q3_ONES = bytes([0x11] * 8 + [0xAA] * 4)


def _half(value: float) -> bytes:
    return np.float16(value).tobytes()


def _e8m0(value: float) -> bytes:
    """Return MXFP4's exponent byte: the power of 2 next to `value`, less 1 as the levels are doubled (ggml-impl.h)."""
    return bytes([int(np.clip(round(np.log2(value)) + 128, 1, 254))])


_LEVELS: dict[str, range | tuple[int, ...]] = {
    "Q4_0": range(16), "Q4_1": range(16), "Q5_0": range(32), "Q5_1": range(32), "Q8_0": range(-127, 128),
    "Q2_K": range(4), "Q3_K": range(8), "Q4_K": range(16), "Q5_K": range(32), "Q6_K": range(64),
    "IQ4_NL": IQ4_LEVELS, "IQ4_XS": IQ4_LEVELS, "MXFP4": MXFP4_LEVELS,
}  # fmt: skip


def _scales(kind: str, std: float) -> list[tuple[int, bytes]]:
    """Return the constant fields of a block of uniform random quants with standard deviation `std`: (offset, bytes)."""
    levels = _LEVELS[kind]
    d = std / float(np.std(np.array(levels, np.float64)))
    mean = d * (len(levels) - 1) / 2  # of levels from 0 on, which a minimum makes symmetric
    match kind:
        case "Q4_1" | "Q5_1":
            return [(0, _half(d) + _half(-mean))]
        case "Q2_K":
            return [(0, b"\x11" * 16), (80, _half(d) + _half(mean))]
        case "Q3_K":
            return [(96, _Q3_ONES), (108, _half(d))]
        case "Q4_K" | "Q5_K":
            return [(0, _half(d) + _half(mean) + _K4_ONES)]
        case "Q6_K":
            return [(192, b"\x01" * 16 + _half(d))]
        case "IQ4_XS":
            return [(0, _half(d) + b"\xaa\xaa" + b"\x11" * 4)]
        case "MXFP4":
            return [(0, _e8m0(d))]
        case _:
            return [(0, _half(d))]


@cache
def _normal_table(kind: str, std: float) -> np.ndarray[Any, Any]:
    """Return 65,536 equally likely values of N(0, std) in the bytes of F32, F16 or BF16."""
    normal = NormalDist(0, std)
    values = np.array([normal.inv_cdf((i + 0.5) / 4096) for i in range(4096)], np.float32)
    values = np.interp(np.arange(65536) / 65535 * 4095, np.arange(4096), values).astype(np.float32)
    return _float_bytes(kind, values)


def _float_bytes(kind: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if kind == "F32":
        return values.astype(np.float32)
    if kind == "F16":
        return values.astype(np.float16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


RANDOM_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip


# Levels of these types are not balanced around 0 (-8..7), which would give a network a common direction that drowns
# its input: every second block gets a negative scale. Where the sign of that scale is.
_SIGN_BYTE = {"Q4_0": 1, "Q5_0": 1, "Q3_K": 109, "Q6_K": 209, "IQ4_NL": 1, "IQ4_XS": 1}


def _raw(rng: np.random.Generator, count: int) -> Bytes:
    words = rng.integers(0, 1 << 64, -(-count // 8), dtype=np.uint64)
    return cast(Bytes, words.view(np.uint8)[:count])


def random_rows(kind: str, rng: np.random.Generator, n_values: int, std: float) -> Bytes:
    """Return `n_values` random weights of type `kind` with standard deviation `std`, as bytes."""
    layout = BY_NAME[kind]
    if layout.block == 1:
        return _normal_table(kind, std)[_raw(rng, 2 * n_values).view(np.uint16)].view(np.uint8)
    blocks = _raw(rng, n_values // layout.block * layout.nbytes).reshape(-1, layout.nbytes)
    if kind == "Q8_0":
        # -128 is not a level of Q8_0: kernels take absolute values in 8 bits.
        quants = blocks[:, 2:].view(np.int8)
        np.maximum(quants, -127, out=quants)
    for offset, field in _scales(kind, std):
        blocks[:, offset : offset + len(field)] = np.frombuffer(field, np.uint8)
    if kind in _SIGN_BYTE:
        blocks[1::2, _SIGN_BYTE[kind]] ^= 0x80
    return blocks.reshape(-1)


def _nibbles(bits: Bytes, low: int, high: int) -> Bytes:
    """Return pairs of 4-bit quants, `low` where the bit is 0: byte i of a group holds value i and value i + half."""
    half = bits.shape[-1] // 2
    first = np.where(bits[..., :half], high, low).astype(np.uint8)
    return first | np.where(bits[..., half:], high << 4, low << 4).astype(np.uint8)


def _with_header(header: bytes, body: Bytes) -> Bytes:
    head = np.broadcast_to(np.frombuffer(header, np.uint8), (len(body), len(header)))
    return np.concatenate([head, body.reshape(len(body), -1)], axis=1)


def _sign_q8_0(bits: Bytes, size: float) -> Bytes:
    quants = np.where(bits, 127, -127).astype(np.int8).view(np.uint8)
    return _with_header(_half(size / 127), quants)


def _sign_q4_0(bits: Bytes, size: float) -> Bytes:
    return _with_header(_half(size / 7), _nibbles(bits, 1, 15))


def _sign_q5_0(bits: Bytes, size: float) -> Bytes:
    # 5-bit 1 and 31 (less 16): the low nibble is 1 or 15, the fifth bit is the sign bit itself.
    fifth = np.packbits(bits, axis=1, bitorder="little")
    return _with_header(_half(size / 15), np.concatenate([fifth, _nibbles(bits, 1, 15)], axis=1))


def _sign_q4_k(bits: Bytes, size: float) -> Bytes:
    quants = _nibbles(bits.reshape(-1, 4, 64), 0, 15)
    return _with_header(_half(2 * size / 15) + _half(size) + _K4_ONES, quants)


def _sign_q5_k(bits: Bytes, size: float) -> Bytes:
    # Bit k of byte i of `qh` is the fifth bit of value 32 k + i.
    fifth = np.packbits(bits.reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
    quants = _nibbles(bits.reshape(-1, 4, 64), 0, 15).reshape(-1, 128)
    header = _half(2 * size / 31) + _half(size) + _K4_ONES
    return _with_header(header, np.concatenate([fifth, quants], axis=1))


def _sign_q6_k(bits: Bytes, size: float) -> Bytes:
    # 6-bit 1 and 63 (less 32). Per half block of 128: 64 bytes of low nibbles (values i and i + 64), 32 bytes of
    # high pairs (values i, i + 32, i + 64, i + 96 from the lowest bits up).
    halves = bits.reshape(-1, 2, 128)
    low = _nibbles(halves, 1, 15).reshape(-1, 128)
    pairs = np.where(halves.reshape(-1, 2, 4, 32), 3, 0).astype(np.uint8)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = np.bitwise_or.reduce(pairs << shifts, axis=2).reshape(-1, 64)
    tail = np.broadcast_to(np.frombuffer(b"\x01" * 16 + _half(size / 31), np.uint8), (len(bits), 18))
    return np.concatenate([low, high, tail], axis=1)


_SIGNS: dict[str, Callable[[Bytes, float], Bytes]] = {
    "Q8_0": _sign_q8_0,
    "Q4_0": _sign_q4_0,
    "Q5_0": _sign_q5_0,
    "Q4_K": _sign_q4_k,
    "Q5_K": _sign_q5_k,
    "Q6_K": _sign_q6_k,
}
SIGN_TYPES = ("F32", "F16", "BF16", *_SIGNS)


def sign_rows(kind: str, codes: Bytes, size: float) -> Bytes:
    """Return rows of weights that are +`size` where the bit of `codes` is 1 and -`size` where it is 0, as bytes.

    `codes`: (rows, row length / 8), the first value in the lowest bit.
    """
    layout = BY_NAME[kind]
    bits = np.unpackbits(codes, axis=1, bitorder="little")
    if layout.block == 1:
        table = _float_bytes(kind, np.array([-size, size], np.float32))
        return table[bits].reshape(-1).view(np.uint8)
    return np.ascontiguousarray(_SIGNS[kind](bits.reshape(-1, layout.block), size)).reshape(-1)
