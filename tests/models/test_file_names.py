"""Tests quantizations in names of files. Those of the usual publishers are in hub/test_listing.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.models.file_names import PREFERRED, rank, shortened, without_quantization


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen3-8B-Q4_K_M", "Qwen3-8B"),
        ("Qwen3-8B-UD-Q4_K_XL", "Qwen3-8B"),
        ("google_gemma-3-12b-it-qat-Q4_0", "google_gemma-3-12b-it"),
        ("Athene-V2-Chat.i1-IQ3_M", "Athene-V2-Chat.i1"),
        ("qwen2.5-1.5b-instruct-fp16", "qwen2.5-1.5b-instruct"),
        ("gemma-Q4_0-it", "gemma-it"),
        ("Model-F16-Q5_K_M", "Model-F16"),
        ("Q8_0", "Q8_0"),
        ("stories260K", "stories260K"),
    ],
)
def test_a_model_is_called_the_same_in_all_its_quantizations(name: str, base: str) -> None:
    assert without_quantization(name) == base


def test_long_names_are_cut_before_their_size_and_quantization_unless_two_would_be_alike() -> None:
    names = {
        "hf.co/bartowski/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M": "hf.co/bartowski/Qwen2.5-Co…7B:Q4_K_M",
        "hf.co/a/Qwen3-30B-A3B-Instruct-2507-GGUF:UD-Q4_K_XL": "hf.co/a/Qwen3-30B-A3B-In…:UD-Q4_K_XL",
        "hf.co/unsloth/DeepSeek-R1-Distill-Qwen-1.5B-GGUF:Q8_0": "hf.co/unsloth/DeepSeek-R1-…1.5B:Q8_0",
        "qwen2.5-coder:7b": "qwen2.5-coder:7b",
    }
    assert shortened([*names]) == [*names.values()]
    alike = [f"hf.co/{owner}/Qwen2.5-Coder-7B-{kind}-GGUF:Q4_K_M" for owner, kind in (("o", "Chat"), ("o", "Base"))]
    cut = shortened([name.replace("/o/", "/a-publisher-of-models/") for name in alike])
    assert len({*cut}) == 2 and not any("…" in name for name in cut)


@given(st.text(max_size=200))
def test_any_name_can_be_cut(name: str) -> None:
    assert len(shortened([name])[0]) <= max(36, len(name))


@given(st.text(max_size=60))
def test_any_name_has_something_left(name: str) -> None:
    assert bool(without_quantization(name)) == bool(name)


def test_the_usual_ones_come_first_then_the_nearest() -> None:
    names = ["BF16", "IQ2_XS", "Q3_K_M", "UD-Q4_K_M", "", "MXFP4", *reversed(PREFERRED)]
    assert sorted(names, key=rank) == ["Q4_K_M", "UD-Q4_K_M", *PREFERRED[1:], "MXFP4", "Q3_K_M", "IQ2_XS", "BF16", ""]
