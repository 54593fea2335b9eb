"""Tests how users name repositories."""

from __future__ import annotations

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.models.hub.client import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unsloth/Qwen3-8B-GGUF", Address(repo="unsloth/Qwen3-8B-GGUF")),
        (" o/n:q4_k_m ", Address(repo="o/n", quantization="Q4_K_M")),
        ("https://huggingface.co/o/n", Address(repo="o/n")),
        (
            "https://huggingface.co/o/n/blob/main/Q8_0/x%20y-00001-of-00002.gguf?download=true",
            Address(repo="o/n", revision="main", path="Q8_0/x y-00001-of-00002.gguf"),
        ),
        (
            "https://huggingface.co/o/n?show_file_info=Q8_0%2Fx-Q8_0-00001-of-00002.gguf&library=x",
            Address(repo="o/n", path="Q8_0/x-Q8_0-00001-of-00002.gguf"),
        ),
        ("hf://o/n@v1/x.gguf", Address(repo="o/n", revision="v1", path="x.gguf")),
    ],
)
def test_names_and_links_are_understood(text: str, address: Address) -> None:
    assert parse_address(text) == address


def test_links_of_another_endpoint_are_understood_when_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080/hf/")
    assert parse_address("http://mirror.example:8080/hf/o/n:Q8_0") == Address(repo="o/n", quantization="Q8_0")


@pytest.mark.parametrize(
    "text",
    ["", "a/b/c", "../..", "https://example.com/o/n", "http://[broken", "hf://datasets/o/n", "o/n\x1b[2J", "o/n:"],
)
def test_what_is_no_model_repository_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert "\x1b" not in caught.value.message
    assert "OWNER/NAME" in caught.value.hint
