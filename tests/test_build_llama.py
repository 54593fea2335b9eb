"""Tests how the benchmarks find what they build llama.cpp's own tools with."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def test_uv_of_the_set_up_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    build = importlib.import_module("build_llama")
    common = importlib.import_module("common")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(build, "CHECKOUT", tmp_path)
    with pytest.raises(common.MeasureError, match="make setup"):
        build.find_uv()
    uv = tmp_path / ".tools/bin/uv"
    uv.parent.mkdir(parents=True)
    uv.touch(0o755)
    assert build.find_uv() == str(uv)
    monkeypatch.setenv("PATH", str(uv.parent))
    assert build.find_uv() == str(uv)
