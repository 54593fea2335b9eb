"""Compares the kernels' products, bit by bit, with plain scalar ones: with sanitizers, and with all instruction sets
emulated, whatever this machine has. This needs g++, and neither the engine nor its library."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from cpuchat.hardware.topology import instructions
from cpuchat.models import kernels

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "cpuchat" / "kernels"
SETS = {
    "AVX2": ("avx2", "AVX2"), "AVX-VNNI": ("avx_vnni", "AVX_VNNI"), "AVX-512 VNNI": ("avx512", "AVX512_VNNI"),
    "AVX-512 VNNI, AMX": ("amx", "AMX_INT8"),
}  # fmt: skip
"""By name of an instruction set the end of its file's name and the feature of CPUs that have it."""
NATIVE = [name for name, (_, feature) in SETS.items() if feature in instructions().features]
HALVES = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)} | dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))
"""Where a block has its scale, and that of its minimums; in other types the scale comes first."""
EXTREMES = (0, 6e-8, -1e-5, 1, -3, 65504)

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # compilation beside other tests
    pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="the kernels are built with g++"),
]


def flags(file: Path, build: str) -> list[str]:
    """Return the flags of kernels.cmake for a file; for the emulated build what they define. With sanitizers, which
    make the compilation long, each instruction set is built once, natively where this CPU has it."""
    is_native = build == "native"
    known = {f"products_{end}": name in NATIVE for name, (end, _) in SETS.items()}
    sanitizers = ["-fsanitize=address," + ("undefined" if is_native else "alignment")]
    sanitizers *= known.get(file.stem, is_native) is is_native
    found = re.search(rf"^instructions\({file.name} (.*)\)$", (SOURCES / "kernels.cmake").read_text("utf-8"), re.M)
    given = found[1].split() if found else []
    if is_native:
        return [*given, *sanitizers]
    defined = [f"-D__{flag[2:].upper().replace('-', '_')}__" for flag in ("-mavx2", *given)]
    return [*defined, '-DCPUCHAT_INTRINSICS="emulated.h"', *sanitizers]


def compiled(build: str, folder: Path) -> Path:
    """Return the program of a build; of all processes of a run the first that asks compiles it."""
    program = folder / f"check-products-{build}"
    with program.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            return program
        files = [*SOURCES.glob("products_*.cpp"), SOURCES / "activations.cpp", SOURCES / "layout.cpp"]

        def compile_one(file: Path) -> str:
            to = f"{program}-{file.stem}.o"
            # Optimized, it would take minutes.
            command = ["g++", "-std=gnu++17", "-O0", "-w", "-Wno-psabi", f"-I{SOURCES}", f"-I{HERE}"]
            command += ["-fno-sanitize-recover", *flags(file, build), "-c", str(file), "-o", to]
            subprocess.run(command, check=True)
            return to

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, [HERE / "check_products.cpp", *files]))
        subprocess.run(["g++", "-fsanitize=address,undefined", *objects, "-o", f"{program}.new"], check=True)
        return Path(f"{program}.new").rename(program)


def write_case(file: Path, kind: str, n_rows: int, n_values: int, n_tokens: int) -> None:
    """Write random blocks with extreme scales, and activations, as check_products.cpp reads them. Weights are integers,
    which gguf's own dequantization gives for scales of one."""
    rng = np.random.default_rng(n_rows * n_tokens)
    number = gguf.GGMLQuantizationType[kind]
    per, size = gguf.GGML_QUANT_SIZES[number]
    blocks = rng.integers(0, 256, (n_rows, n_values // per, size), dtype=np.uint8)
    shape, places = blocks.shape[:2], HALVES.get(kind, (0,))

    def dequantized(*scales: np.ndarray | float) -> np.ndarray:
        for at, scale in zip(places, scales, strict=True):
            halves = np.broadcast_to(np.asarray(scale, np.float16), shape)[..., None].copy()
            blocks[..., at : at + 2] = halves.view(np.uint8)
        return gguf.dequantize(blocks.reshape(n_rows, -1), number).reshape(n_rows, n_values)

    if kind == "MXFP4":  # a power of two
        blocks[..., 0] = 128
        weights = gguf.dequantize(blocks.reshape(n_rows, -1), number)
        blocks[..., 0] = rng.choice([0, 1, 2, 100, 128, 150], shape)
        scales = [np.ldexp(1.0, blocks[..., 0].astype(int) - 128)]
    else:
        weights = dequantized(1, *[0] * (len(places) - 1))
        extreme = [rng.choice(EXTREMES, shape) for _ in places]
        scales = [
            np.where(rng.random(shape) < 0.2, one, rng.normal(0, 0.01, shape)).astype(np.float16) for one in extreme
        ]
    minimums = -dequantized(0, 1) if len(places) > 1 else np.zeros_like(weights)
    if kind != "MXFP4":
        dequantized(*scales)
    x = rng.normal(0, 1, (n_tokens, n_values)) * rng.choice([1, 1, 1e-3, 1e4, 1e-32, 0], (n_tokens, 1))
    x[0, :per], x[-1, :per] = 1, -1  # all as large as bytes become
    header = [kernels.TYPES.index(kind), n_values, n_rows, n_tokens, blocks[0].nbytes, len(places) > 1]
    floats = [*scales, *[np.zeros(shape)] * (2 - len(scales)), x]
    parts = [np.array(header, np.int64), blocks, weights.astype(np.int16), minimums.astype(np.int16)]
    file.write_bytes(b"".join(part.tobytes() for part in [*parts, *(one.astype(np.float32) for one in floats)]))


@pytest.mark.parametrize("kind", kernels.TYPES)
@pytest.mark.parametrize("build", ["native", "emulated"])
def test_products_have_the_bits_of_scalar_ones(build: str, kind: str, tmp_path: Path, shared_folder: Path) -> None:
    sets = NATIVE if build == "native" else list(SETS)
    if not sets:
        pytest.skip("this CPU has none of the instruction sets; they are checked in the emulated build")
    program, case = compiled(build, shared_folder), tmp_path / "case.bin"
    for n_rows, n_values, n_tokens in ((17, 512, 9), (1, 256, 1), (8, 512, 130)):
        write_case(case, kind, n_rows, n_values, n_tokens)
        done = subprocess.run([program, case, *sets], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines() == [f"{name}: compared" for name in sets]
