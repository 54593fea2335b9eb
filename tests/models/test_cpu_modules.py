"""Tests which CPU modules are worth timing, and which one a worker is started with."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from cpuchat.backend import local
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import instructions, read_topology
from cpuchat.models import cpu_modules
from cpuchat.models.cpu_modules import AUTO, fastest_first
from tests.hardware.trees import write

# ggml_backend_score of each x86 module on a CPU that runs it (ggml-cpu/arch/x86/cpu-feats.cpp).
SCORES = {
    "x64": 1, "sse42": 5, "sandybridge": 21, "ivybridge": 23, "piledriver": 24, "haswell": 64, "alderlake": 128,
    "skylakex": 192, "cannonlake": 448, "cascadelake": 1216, "icelake": 1472, "cooperlake": 1728, "zen4": 1984,
    "sapphirerapids": 4032,
}  # fmt: skip


def scores(*lacks: str) -> dict[str, int]:
    """Return the scores on a CPU that cannot run some of the modules."""
    return {name: 0 if name in lacks else score for name, score in SCORES.items()}


def without(names: Iterable[str]) -> dict[str, int]:
    return scores(*(name for name in SCORES if name not in {*names}))


OLD = ("x64", "sse42", "sandybridge")
UP_TO_AVX2 = (*OLD, "ivybridge", "piledriver", "haswell")
SERVER = "avx f16c fma avx2 bmi2 avx512f avx512_vnni amx_int8"


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (scores(), ("sapphirerapids", "zen4", "cannonlake", "alderlake")),
        (without((*UP_TO_AVX2, "skylakex", "cascadelake")), ("cascadelake", "skylakex", "haswell")),
        (without(UP_TO_AVX2), ("haswell",)),
        (without(OLD), ("sandybridge",)),
        ({"armv8.0_1": 1, "armv8.2_1": 2, "armv8.2_2": 6, "armv8.6_1": 0}, ("armv8.2_2", "armv8.2_1", "armv8.0_1")),
    ],
)
def test_modules_worth_timing_differ_in_their_dot_products(found: dict[str, int], wanted: tuple[str, ...]) -> None:
    assert fastest_first(found) == wanted


@pytest.mark.parametrize(
    ("flags", "setting", "wanted"),
    [
        (SERVER, AUTO, {"AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX512", "AVX512_VNNI"}),
        (SERVER, "haswell", {"AVX", "AVX2", "F16C", "FMA", "BMI2"}),
        (SERVER, "x64", set[str]()),
        (SERVER, "unknown", {"AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX512", "AVX512_VNNI", "AMX_INT8"}),
        ("avx f16c fma avx2 bmi2", AUTO, {"AVX", "AVX2", "F16C", "FMA", "BMI2"}),
    ],
)
def test_the_engine_uses_the_instructions_of_its_module(
    flags: str, setting: str, wanted: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a CPU that has them; all of them if it was built for one CPU."""
    write(tmp_path, {"proc/cpuinfo": f"processor: 0\nflags: {flags}\n"})
    monkeypatch.delenv(cpu_modules.MODULE_VARIABLE, raising=False)
    monkeypatch.setattr(cpu_modules, "installed", lambda: dict.fromkeys((*UP_TO_AVX2, "skylakex", "cascadelake")))
    found = cpu_modules.engine_cpu.__wrapped__
    assert found(setting, tmp_path).features == wanted
    monkeypatch.setenv(cpu_modules.MODULE_VARIABLE, "sandybridge")  # what the process of a worker is told
    assert found(AUTO, tmp_path).features == {"AVX"}
    monkeypatch.setattr(cpu_modules, "installed", dict)
    assert found(setting, tmp_path) == instructions(tmp_path)


def test_a_worker_is_started_with_what_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = place(read_topology(), PlacementSpec())
    monkeypatch.setattr(local, "installed", dict)  # an engine that was built for this CPU has no modules
    assert local._launch(placement, "haswell").cpu_module == AUTO
    monkeypatch.setattr(local, "installed", lambda: {"haswell": Path(), "cascadelake": Path()})
    assert [local._launch(placement, name).cpu_module for name in (AUTO, "haswell")] == [AUTO, "haswell"]


def test_modules_are_named_by_their_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "llama_cpp" / "lib"
    library.mkdir(parents=True)
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    assert cpu_modules.installed.__wrapped__() == {}
    for name in ("libllama.so", "libggml-cpu.so", "libggml-cpu-haswell.so", "libggml-cpu-armv8.2_1.so"):
        (library / name).touch()
    found = cpu_modules.installed.__wrapped__()
    assert found == {name: library / f"libggml-cpu-{name}.so" for name in ("armv8.2_1", "haswell")}
