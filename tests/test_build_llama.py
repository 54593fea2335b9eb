"""Tests how the benchmarks build llama.cpp's own libraries."""

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


def test_a_build_of_another_checkout_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    module = importlib.import_module("build_llama")
    commands: list[list[str]] = []
    monkeypatch.setattr(module, "run", commands.append)
    source, build = tmp_path / "source", tmp_path / "build"
    (tmp_path / "link").symlink_to(tmp_path)

    def built(made_in: Path, made_for: Path) -> bool:
        """Return whether what was built before is still there."""
        build.mkdir(exist_ok=True)
        (build / "object.o").touch()
        cache = f"# a comment\nCMAKE_CACHEFILE_DIR:INTERNAL={made_in}\nCMAKE_HOME_DIRECTORY:INTERNAL={made_for}\n"
        (build / "CMakeCache.txt").write_text(cache)
        module.cmake(source, build, ["llama-bench"], 1)
        return (build / "object.o").exists()

    assert built(build, source) and built(tmp_path / "link/build", tmp_path / "link/source")
    assert not built(tmp_path / "other/build", source)
    assert not built(build, tmp_path / "other/source")
    assert len(commands) == 8
