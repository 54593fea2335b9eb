"""Tests which types of weights cpuchat's kernels are chosen for, by what was measured."""

from __future__ import annotations

import time

import pytest

from cpuchat.costs.products import ProductRate
from cpuchat.hardware.topology import Instructions
from cpuchat.models import fit, kernels
from cpuchat.models.kernels import TYPES, MeasuredProducts, ProductLog, chosen_types
from cpuchat.models.synthetic.model import SHAPES, header_of
from cpuchat.protocol.messages import LoadOptions

CPU = Instructions(frozenset({"AVX2", "FMA"}))


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "instructions_used", lambda cpu: "AVX2" if cpu is CPU else "")


def measured(*ratios: float, difference: float = 1e-3, disturbed: bool = False, age: float = 0.0) -> MeasuredProducts:
    """Return a measurement of passes of 1, 8 and 64 tokens."""
    tokens = (1.0, 8.0, 64.0)
    return MeasuredProducts(
        cpuchat=ProductRate("Q4_K", "cpuchat", tuple((n, r * 1e9) for n, r in zip(tokens, ratios, strict=True))),
        llama_cpp=ProductRate("Q4_K", "llama.cpp", tuple((n, 1e9) for n in tokens)),
        difference=difference,
        disturbed=disturbed,
        made=time.time() - age,
    )


@pytest.mark.parametrize(
    ("found", "is_chosen"),
    [
        (measured(1.2, 1.5, 1.5), True),
        (measured(0.98, 1.5, 1.5), True),
        (measured(0.95, 3.0, 3.0), False),  # decoding must not lose
        (measured(1.01, 0.9, 0.9), False),
        (measured(0.5, 0.5, 0.5, disturbed=True), True),
        (measured(2.0, 2.0, 2.0, difference=0.02), False),
    ],
)
def test_a_type_is_chosen_by_its_rates_unless_results_differ(found: MeasuredProducts, is_chosen: bool) -> None:
    ProductLog((0,)).put({"Q4_K": found})
    assert ("Q4_K" in chosen_types(CPU, cpus=(0,))) is is_chosen
    assert chosen_types(CPU, cpus=(0,)) >= {*TYPES} - {"Q4_K"}


def test_nothing_is_chosen_where_the_kernels_do_not_run_or_are_not_wanted() -> None:
    assert chosen_types(CPU) == {*TYPES}
    assert chosen_types(CPU, "llama.cpp") == frozenset()
    assert chosen_types(Instructions(frozenset({"NEON"}))) == frozenset()


def test_a_forecast_is_for_the_cores_of_the_last_load() -> None:
    slower, faster = {"Q4_K": measured(0.5, 0.5, 0.5)}, {"Q4_K": measured(2.0, 2.0, 2.0)}
    ProductLog((0,)).put(slower)
    assert "Q4_K" not in chosen_types(CPU)
    ProductLog((0, 1)).put(faster)
    assert "Q4_K" in chosen_types(CPU)
    assert "Q4_K" not in chosen_types(CPU, cpus=(0,))
    ProductLog((0,)).put({})
    assert "Q4_K" not in chosen_types(CPU)


def test_a_measurement_beside_other_programs_is_soon_due_again() -> None:
    assert not measured(1.0, 1.0, 1.0, age=86_400).is_due
    assert measured(1.0, 1.0, 1.0, age=86_400, disturbed=True).is_due
    assert not measured(1.0, 1.0, 1.0, age=60, disturbed=True).is_due
    assert measured(1.0, 1.0, 1.0, age=-3600).is_due


def test_a_forecast_counts_no_copy_for_types_that_stay_with_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "engine_cpu", lambda module: CPU)
    header, options = header_of(SHAPES["0.5b"], "Q8_0"), LoadOptions()  # llama.cpp repacks no Q8_0 with AVX2
    ours = fit.required_memory(header, options, 512)
    assert ours.repack > 0
    ProductLog((0,)).put({"Q8_0": measured(0.5, 0.5, 0.5)})
    assert fit.required_memory(header, options, 512).repack == 0
