"""Tests quantizations in names of files. Those of the usual publishers are in hub/test_listing.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.models.file_names import PREFERRED, rank, without_quantization


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


@given(st.text(max_size=60))
def test_any_name_has_something_left(name: str) -> None:
    assert bool(without_quantization(name)) == bool(name)


def test_the_usual_ones_come_first_then_the_nearest() -> None:
    names = ["BF16", "IQ2_XS", "Q3_K_M", "UD-Q4_K_M", "", "MXFP4", *reversed(PREFERRED)]
    assert sorted(names, key=rank) == ["Q4_K_M", "UD-Q4_K_M", *PREFERRED[1:], "MXFP4", "Q3_K_M", "IQ2_XS", "BF16", ""]
