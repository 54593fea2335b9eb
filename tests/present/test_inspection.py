"""Tests how what is known of a model by its header is worded."""

from __future__ import annotations

from cpuchat.models.inspect import inspect
from cpuchat.models.synthetic.model import header_of
from cpuchat.present.models import kv_growth


def test_what_grows_with_the_context_is_told_apart_from_windows() -> None:
    found = inspect(header_of("27b-gemma3"))
    assert (found.window, found.windowed_layers, found.kv_per_token) == (1024, 52, 10 * 8192)
    assert (
        kv_growth(found.kv_per_token, found.kv_windowed) == "81.9 kB per token of context + 654 MB for sliding windows"
    )
    assert kv_growth(512, 0, " as F16") == "512 B per token of context as F16"
    assert kv_growth(0, 512) == "512 B for sliding windows"
    assert kv_growth(0, 0) == ""
