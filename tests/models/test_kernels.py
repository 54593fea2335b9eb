"""Tests which types of weights cpuchat's kernels are chosen for, by what was measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpuchat.costs.model import ProductRate
from cpuchat.hardware.topology import Instructions, instructions
from cpuchat.measure import store
from cpuchat.models import fit, kernels
from cpuchat.models.kernels import TYPES, MeasuredProducts, ProductLog, chosen_types
from cpuchat.models.synthetic.model import SHAPES, header_of
from cpuchat.protocol.messages import LoadOptions
from tests.hardware.trees import write

INSTRUCTIONS_USED = kernels.instructions_used
CPU, OTHER = Instructions(frozenset({"AVX2", "FMA"})), Instructions(frozenset({"AVX2", "FMA", "AVX_VNNI"}))


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {CPU: "AVX2", OTHER: "AVX-VNNI"}
    monkeypatch.setattr(kernels, "instructions_used", lambda cpu: names.get(cpu, ""))


def log(cpu: Instructions = CPU) -> ProductLog:
    return ProductLog((0,), cpu=cpu)


def measured(*ratios: float, difference: float = 1e-3, disturbed: bool = False, age: float = 0.0) -> MeasuredProducts:
    """Return a measurement of passes of 1, 8 and 64 tokens."""
    tokens = (1.0, 8.0, 64.0)
    return MeasuredProducts(
        cpuchat=ProductRate("Q4_K", tuple((n, r * 1e9) for n, r in zip(tokens, ratios, strict=True))),
        llama_cpp=ProductRate("Q4_K", tuple((n, 1e9) for n in tokens)),
        difference=difference,
        disturbed=disturbed,
        made=time.time() - age,
    )


@pytest.mark.parametrize(
    ("found", "is_chosen"),
    [
        (measured(1.2, 1.5, 1.5), True),
        (measured(0.98, 1.5, 1.5), True),
        (measured(0.94, 3.0, 3.0), False),  # decoding must not lose
        (measured(1.01, 0.9, 0.9), False),
        (measured(0.5, 0.5, 0.5, disturbed=True), True),
        (measured(2.0, 2.0, 2.0, difference=0.02), False),
    ],
)
def test_a_type_is_chosen_by_its_rates_unless_results_differ(found: MeasuredProducts, is_chosen: bool) -> None:
    log().put({"Q4_K": found})
    assert ("Q4_K" in chosen_types(CPU, cpus=(0,))) is is_chosen
    assert chosen_types(CPU, cpus=(0,)) >= {*TYPES} - {"Q4_K"}


def test_nothing_is_chosen_where_the_kernels_do_not_run_or_are_not_wanted() -> None:
    assert chosen_types(CPU) == {*TYPES}
    assert chosen_types(CPU, "llama.cpp") == frozenset()
    assert chosen_types(Instructions(frozenset({"NEON"}))) == frozenset()


def test_a_forecast_is_for_the_cores_of_the_last_load() -> None:
    slower, faster = {"Q4_K": measured(0.5, 0.5, 0.5)}, {"Q4_K": measured(2.0, 2.0, 2.0)}
    log().put(slower)
    assert "Q4_K" not in chosen_types(CPU)
    ProductLog((0, 1), cpu=CPU).put(faster)
    assert "Q4_K" in chosen_types(CPU)
    assert "Q4_K" not in chosen_types(CPU, cpus=(0,))
    log().put({})
    assert "Q4_K" not in chosen_types(CPU)


def test_a_measurement_beside_other_programs_is_soon_due_again() -> None:
    assert not measured(1.0, 1.0, 1.0, age=86_400).is_due
    assert measured(1.0, 1.0, 1.0, age=86_400, disturbed=True).is_due
    assert not measured(1.0, 1.0, 1.0, age=60, disturbed=True).is_due
    assert measured(1.0, 1.0, 1.0, age=-3600).is_due


def test_a_forecast_counts_no_copy_for_types_that_stay_with_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "engine_cpu", lambda module: CPU)
    header, options = header_of(SHAPES["0.5b"], "Q8_0"), LoadOptions()  # llama.cpp repacks no Q8_0 with AVX2
    assert fit.required_memory(header, options, 512).repack > 0
    log().put({"Q8_0": measured(0.5, 0.5, 0.5)})
    assert fit.required_memory(header, options, 512).repack == 0


def test_scratch_memory_of_attention_grows_with_threads_and_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "engine_cpu", lambda module: CPU)
    header = header_of(SHAPES["7b"], "Q8_0")

    def scratch(n_cpus: int, n_ctx: int, **options: Any) -> int:
        found: list[int] = []
        for count in (n_cpus, 0):
            monkeypatch.setattr(fit, "_n_cpus", lambda count=count: count)
            found.append(fit.required_memory(header, LoadOptions(**options), n_ctx).compute)
        return found[0] - found[1]

    # Six rows of 128 values and 8 more for each part of 512 cells, or of nine tiles.
    assert scratch(96, 16_384) == 96 * 2 * 32 * 6 * 136 * 4 == pytest.approx(20e6, rel=0.01)
    assert scratch(2, 512) == 2 * 9 * 6 * 136 * 4
    assert scratch(96, 16_384, kernels="llama.cpp") == scratch(96, 16_384, type_k="q8_0", type_v="q8_0") == 0


def test_what_was_measured_is_for_its_instruction_set_only() -> None:
    log().put({"Q4_K": measured(0.5, 0.5, 0.5)})
    assert "Q4_K" not in chosen_types(CPU, cpus=(0,))
    assert chosen_types(OTHER, cpus=(0,)) == chosen_types(OTHER) == {*TYPES}
    log(OTHER).put({"Q4_K": measured(2.0, 2.0, 2.0)})
    assert "Q4_K" not in chosen_types(CPU)
    assert "Q4_K" in chosen_types(OTHER)


@pytest.mark.parametrize(
    "points",
    [(), ((2.0, 1e9), (8.0, 1e9), (64.0, 1e9)), ((1.0, 0.0), (8.0, 1e9), (64.0, 1e9))],
    ids=["no rates", "other passes", "rates of zero"],
)
def test_rates_that_cannot_be_are_not_read(points: tuple[tuple[float, float], ...]) -> None:
    one = msgspec.to_builtins(measured(0.5, 0.5, 0.5))
    one["cpuchat"]["points"] = points
    store.keep(log().on, "products", {"Q4_K": one})
    assert log().read() == {}
    assert chosen_types(CPU) == chosen_types(CPU, cpus=(0,)) == {*TYPES}
    log().put({"Q6_K": measured(0.5, 0.5, 0.5)})
    log().put({"Q8_0": measured(0.5, 0.5, 0.5)})
    assert {*log().read()} == {"Q6_K", "Q8_0"}


@pytest.mark.parametrize("hidden", ["avx2", "fma", "f16c"])
def test_instructions_that_the_system_hides_are_not_used(
    hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "library", lambda: tmp_path)
    flags = {"avx", "avx2", "fma", "f16c", "bmi2", "avx512f", "avx512_vnni"}
    for root, names in (("all", flags), ("hidden", flags - {hidden})):
        write(tmp_path / root, {"proc/cpuinfo": f"flags: {' '.join(sorted(names))}"})
    assert INSTRUCTIONS_USED(instructions(tmp_path / "all")) == "AVX-512 VNNI"
    assert not INSTRUCTIONS_USED(instructions(tmp_path / "hidden"))
