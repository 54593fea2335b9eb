"""Published values are found by the names that models go by."""

from __future__ import annotations

import pytest

from cpuchat.quality.statistics import PUBLISHED, published_for


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Meta-Llama-3-8B-Instruct-Q4_K_M.gguf", "Llama-3-8B"),
        ("llama3:8b", "Llama-3-8B"),
        ("Meta Llama 3 8B", "Llama-3-8B"),
        ("TheBloke/Llama-2-7B-Chat-GGUF", "Llama-2-7B"),
        ("Qwen3-4B-Instruct-2507-Q4_K_M", "Qwen3-4B-2507"),
        ("Qwen3 4B Thinking 2507", "Qwen3-4B-2507"),
        ("unsloth/Qwen3.6-27B-GGUF", "Qwen3.6-27B"),
    ],
)
def test_the_same_family_comes_first(name: str, model: str) -> None:
    found = published_for(name, "Q4_K_M")
    same = [row for row in found if row.same_family]
    assert {row.model for row in same} == {model}
    assert found[: len(same)] == same
    assert {row.model for row in found} == {"Llama-3-8B", "Llama-2-7B", "Qwen3-4B-2507", "Qwen3.6-27B"}


@pytest.mark.parametrize(
    "name",
    ["Llama-3.1-8B-Instruct", "Llama-3.2-3B", "Llama-2-70B", "Llama-3-80B", "Qwen3-4B", "Qwen3.6-27B2", "gemma", ""],
)
def test_other_models_have_only_other_families(name: str) -> None:
    found = published_for(name, "q6_k")
    assert [row.kld_mean for row in found] == [0.005452, 0.002098, 0.0096]
    assert not any(row.same_family for row in found)


def test_what_is_not_published_is_not_made_up() -> None:
    assert published_for("Llama-3-8B", "TQ1_0") == []
    assert published_for("Llama-3-8B", "UD-Q4_K_XL") == []
    assert published_for("Llama-3-8B", "UD-Q4_K_M") == []
    assert published_for("Qwen3-4B-2507", "Q8_0")[0].same_top is None


def test_no_row_is_there_twice() -> None:
    assert len({(row.model, row.quantization, row.imatrix) for row in PUBLISHED}) == len(PUBLISHED)


def test_fewer_bits_lose_more() -> None:
    for model in {row.model for row in PUBLISHED}:
        loss = {row.quantization: row.kld_mean for row in PUBLISHED if row.model == model and not row.imatrix}
        order = [loss[name] for name in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K") if name in loss]
        assert order == sorted(order)
