"""Tests measuring a disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpuchat.hardware.memory import read_rate


def test_a_rate_needs_a_file_of_some_size(tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(bytes(32 << 20))
    small.write_bytes(bytes(1000))
    rate = read_rate(large)
    assert rate is None or rate > 0  # None: a file system without O_DIRECT
    assert read_rate(small) is None
    assert read_rate(tmp_path / "none") is None


def test_a_system_without_direct_reads_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "large"
    file.write_bytes(bytes(32 << 20))
    monkeypatch.delattr(os, "O_DIRECT")
    assert read_rate(file) is None
