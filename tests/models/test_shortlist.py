"""Tests which models of the catalog are put first on which machine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.costs.model import CostProfile, ProductRate
from cpuchat.models.catalog import PACE, Catalog, CatalogModel, Ranked, best_local, estimates, load_catalog, ranked
from cpuchat.models.library.places import LocalModel
from cpuchat.models.machine import Machine
from cpuchat.models.prediction import Prediction, estimate_local
from cpuchat.models.quantize.types import typical_speeds
from cpuchat.present.models import verdict, why_here
from tests.support.costs import reading

GB = 10**9


def machine(free: float, peak: float) -> Machine:
    """Return a machine with that many GB of memory, 90 % of it free, and that many GB/s."""
    profile = reading(0.7 * peak * GB)
    return Machine(available=int(free * GB), total=int(free * GB / 0.9), profile=profile, source="measured")


def computing(kind: str) -> CostProfile:
    """Return a machine on which one type takes three times as long as reading it."""
    rates = {one: 40e9 / (3 if one == kind else 1) for one in ("Q4_K", "Q6_K", "Q8_0")}
    return CostProfile(bandwidth=40e9, products=tuple(ProductRate(one, ((1.0, rate),)) for one, rate in rates.items()))


def judged(models: tuple[CatalogModel, ...], where: Machine) -> tuple[Ranked, dict[str, Prediction]]:
    predictions = estimates(models, where)
    return ranked(models, predictions), predictions


def model(name: str, size: float, **facts: object) -> CatalogModel:
    given = {"family": "F", "publisher": name, "params": size * 1.6, "repos": (f"a/{name}",), "sizes": {"Q4_K_M": size},
             "verified": ("repo",), "year": 2025, **facts}  # fmt: skip
    return CatalogModel(id=name, name=name, **given)  # type: ignore[arg-type]


def names(models: tuple[CatalogModel, ...]) -> list[str]:
    return [one.name for one in models]


def test_each_model_is_in_one_place_and_those_that_suit_fit_and_keep_up_with_reading() -> None:
    catalog = load_catalog().models
    for where in (machine(6, 20), machine(14, 40), machine(60, 90), machine(700, 400)):
        found, predictions = judged(catalog, where)
        everywhere = [*found.suits, *found.others, *found.unsuitable]
        assert sorted(one.id for one in everywhere) == sorted(one.id for one in catalog)
        assert 3 <= len(found.suits) <= 8
        for one in found.suits:
            assert predictions[one.id].verdict == "fits" and (predictions[one.id].tok_s or 0) >= PACE
        for one in found.unsuitable:
            assert predictions[one.id].verdict == "too large" or predictions[one.id].too_slow
        for doubt in ({"estimated": True}, {"at_least": True}):  # then the low end of the range counts
            rough, _ = judged(catalog, msgspec.structs.replace(where, **doubt))
            assert all((predictions[one.id].tok_s or 0) >= 2 * PACE for one in rough.suits)
            rough, _ = judged(catalog, msgspec.structs.replace(where, fitted=True, **doubt))
            assert names(rough.suits) == names(found.suits)


def test_of_one_publisher_the_newest_and_then_the_largest_is_taken() -> None:
    found, _ = judged((
        model("old", 4, publisher="P", year=2024), model("small", 1, publisher="P"), model("large", 3, publisher="P"),
        model("slow", 12, publisher="P"), model("other", 2),
    ), machine(20, 40))  # fmt: skip
    assert names(found.suits) == ["large", "other", "small"] and found.purposes["small"] == "fast"
    assert names(found.others) == ["slow", "old"]


def test_drafts_and_repositories_that_nobody_saw_are_not_put_first() -> None:
    found, _ = judged((model("draft", 1, use="draft"), model("unseen", 1, verified=())), machine(20, 40))
    assert not found.suits and names(found.others) == ["draft", "unseen"]


def test_a_permissive_license_comes_first_and_research_only_never() -> None:
    found, _ = judged((
        model("large", 4, license="falcon"), model("open", 2, license="mit"), model("research", 2, license="mrl"),
    ), machine(20, 40))  # fmt: skip
    assert names(found.suits) == ["open", "large"] and names(found.others) == ["research"]


def test_one_model_for_each_other_purpose_follows_those_for_chat() -> None:
    found, _ = judged((
        model("code", 4, publisher="P", use="code"), model("more code", 3, use="code"), model("chat", 4, publisher="P"),
        model("thinking", 2, use="reasoning"), model("quick", 1, publisher="P"), model("tiny", 0.3, publisher="P"),
        model("long", 3, publisher="P", context=1 << 20),
    ), machine(20, 40))  # fmt: skip
    assert [(found.purposes[one.id], one.name) for one in found.suits] == [
        ("chat", "chat"), ("fast", "quick"), ("long context", "long"), ("reasoning", "thinking"), ("code", "code"),
    ]  # fmt: skip
    assert names(found.others) == ["more code", "tiny"]


def test_a_type_without_vector_instructions_on_this_cpu_is_marked_and_never_put_first() -> None:
    ternary = model("ternary", 2, sizes={"Q2_0_G64": 2}, year=2026)
    here = msgspec.structs.replace(machine(20, 40), scalar_types=frozenset({"Q2_0"}))
    found, predictions = judged((ternary, model("usual", 2)), here)
    assert names(found.suits) == ["usual"] and names(found.others) == ["ternary"]
    assert verdict(predictions["ternary"]) == "no SIMD" and predictions["ternary"].tok_s is None
    assert "Q2_0 has no SIMD kernel on this CPU" in predictions["ternary"].basis
    assert names(judged((ternary, model("usual", 2)), machine(20, 40))[0].suits) == ["ternary", "usual"]


def test_a_better_quantization_is_offered_where_it_was_measured_to_be_as_fast_and_fits_well() -> None:
    both = model("both", 4, sizes={"Q4_K_M": 4, "Q6_K": 5.5, "Q8_0": 7}, params=6.6)
    catalog, usual = Catalog((both,)), machine(30, 40)
    measured = msgspec.structs.replace(usual, profile=computing("Q4_K"), probed=True)
    for where, offered in (
        (usual, "Q4_K_M"),  # by its bytes
        (msgspec.structs.replace(usual, profile=computing("Q4_K")), "Q4_K_M"),  # nothing was measured
        (measured, "Q8_0"),
        (msgspec.structs.replace(measured, total=14 * GB), "Q6_K"),
    ):
        found = catalog.on(where).models[0]
        assert (found.quantization, found.size) == (offered, round(both.sizes[offered] * GB))
    assert catalog.on(msgspec.structs.replace(measured, profile=reading(40e9))).models[0].quantization == "Q4_K_M"
    chosen = msgspec.structs.replace(both, file="Q6_K")
    assert Catalog((chosen,)).on(measured).models[0].quantization == "Q6_K"


def test_a_type_is_as_fast_as_its_kernels_are_and_not_as_its_bytes_promise() -> None:
    here = msgspec.structs.replace(
        machine(30, 40), profile=computing("Q4_K"), measured_types=frozenset({"Q4_K", "Q8_0"})
    )
    speeds = typical_speeds(here)
    q4, q6 = speeds["Q4_K_M"][1], speeds["Q6_K"][1]
    assert q4.is_measured and q4.ratio < 0.8 < 1.7 < q4.by_bytes
    assert "Q4_K takes more arithmetic on this CPU" in why_here("Q4_K", q4)
    assert not q6.is_measured and q6.ratio == pytest.approx(q6.by_bytes, rel=0.01)
    assert "fewer bytes" in why_here("Q6_K", q6)
    assert "TQ1_0" not in speeds


def test_under_one_token_per_second_is_too_slow() -> None:
    found, predictions = judged((model("slow", 10), model("usable", 5)), machine(20, 12))
    assert names(found.unsuitable) == ["slow"] and names(found.others) == ["usable"]
    assert [verdict(predictions[name]) for name in ("slow", "usable")] == ["too slow", "fits"]


def mine(name: str, params: float, kind: str = "Q4_K_M", **facts: object) -> LocalModel:
    size = int(params * (1.1 if kind == "Q8_0" else 0.6))
    given = {"name": name, "source": "folder", "has_template": True, "n_params": int(params), "size": size, **facts}
    return LocalModel(path=Path(f"/models/{name}-{kind}.gguf"), quantization=kind, **given)  # type: ignore[arg-type]


def first(*models: LocalModel) -> str:
    where = machine(20, 40)
    found = best_local((one, estimate_local(one, where)) for one in models)
    return f"{found.name} {found.quantization}" if found is not None else ""


def test_the_model_to_open_first_is_the_largest_that_keeps_up_with_reading() -> None:
    small, medium, large = mine("small", 5e8), mine("medium", 3e9), mine("large", 14e9)
    huge, base = mine("huge", 70e9), mine("base", 4e9, has_template=False)
    assert first(small, large, medium, huge, base) == "medium Q4_K_M"
    assert first(mine("medium", 3e9, "Q8_0"), medium, small) == "medium Q4_K_M"
    assert first(msgspec.structs.replace(small, last_used=1.0), medium) == "small Q4_K_M"
    assert first(large, mine("larger", 20e9)) == "large Q4_K_M"  # none keeps up
    assert first(huge, mine("x", 3e9, damaged="cut short"), mine("demo", 1e7, source="demo"), mine("draft", 5e8)) == ""
    assert first(base) == "base Q4_K_M"
