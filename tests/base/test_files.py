"""Tests the atomic writer and the JSON cache that several processes share."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpuchat.base import paths
from cpuchat.base.files import JsonCache, atomic_writer, file_lock, is_locked, write_atomically
from cpuchat.config import servers, settings


def cache(file: Path, max_entries: int = 9) -> JsonCache[int]:
    return JsonCache(file, int, version=1, max_entries=max_entries, max_bytes=1000)


@pytest.mark.parametrize("sync", [True, False])
def test_the_content_and_the_mode_are_replaced_and_nothing_else_is_left(tmp_path: Path, sync: bool) -> None:
    file = tmp_path / "new" / "a.sh"
    write_atomically(file, "one ü")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    write_atomically(file, b"two", mode=0o755, sync=sync)
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"two", 0o755)
    assert list(file.parent.iterdir()) == [file]


def test_an_error_leaves_the_old_content(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_atomically(file, "old")
    with pytest.raises(KeyError), atomic_writer(file) as stream:
        stream.write(b"half of the n")
        raise KeyError
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_lock_is_seen_by_others_until_it_ends(tmp_path: Path) -> None:
    (lock := tmp_path / "lock").touch()
    with file_lock(lock):
        assert is_locked(lock)
    assert not is_locked(lock) and not is_locked(tmp_path / "none")


def test_the_oldest_entries_go(tmp_path: Path) -> None:
    kept = cache(tmp_path / "k.json", max_entries=3)
    for name in "abcad":
        kept.put({name: ord(name)})
    assert list(kept.read().items()) == [("c", 99), ("a", 97), ("d", 100)]
    kept.remove("c")
    kept.remove("nothing")
    assert list(kept.read()) == ["a", "d"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b'{"version": 2, "entries": {}}', b'{"version": 1, "entries": {"a": "b"}}', b"[" * 5000],
)
def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    kept = cache(tmp_path / "k.json")
    kept.file.write_bytes(content)
    assert kept.read() == {}
    kept.put({"a": 1})
    assert kept.read() == {"a": 1}


@pytest.mark.timeout(180)
def test_a_process_that_hangs_with_the_lock_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuchat.base.files.LOCK_SECONDS", 0.05)
    kept = cache(tmp_path / "k.json")
    kept.put({"a": 1})
    with file_lock(tmp_path):
        kept.put({"b": 2})
    assert kept.read() == {"a": 1, "b": 2}


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cpuchat.base import files\n"
        "files.LOCK_SECONDS = 1000\n"
        "cache = files.JsonCache(Path(sys.argv[1]), int, version=1, max_entries=99)\n"
        "for name in sys.argv[2:]: cache.put({name: 1})"
    )
    names = [f"{n}" for n in range(40)]
    command = [sys.executable, "-c", code, str(tmp_path / "k.json")]
    programs = [subprocess.Popen([*command, *names[first::2]]) for first in range(2)]
    assert [program.wait() for program in programs] == [0, 0]
    assert sorted(cache(tmp_path / "k.json").read()) == sorted(names)


def _deep(file: Path) -> None:
    file.write_bytes(b'{"version": 1, "entries": {"a": ' + b"[" * 100_000)


@pytest.mark.timeout(180)  # a pipe without a writer blocks its reader
@pytest.mark.parametrize("damage", [os.mkfifo, _deep])
def test_a_pipe_or_deep_nesting_in_place_of_a_file_of_the_apps_own_is_no_file(
    damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"CPUCHAT_{kind}_DIR", str(tmp_path))
    cache = JsonCache(tmp_path / "cache.json", dict[str, Any], version=1, max_entries=9)
    for file in (cache.file, paths.state_file(), paths.servers_dir() / "1.json"):
        file.parent.mkdir(exist_ok=True)
        damage(file)
    assert cache.read() == {}
    assert settings.read_state() == settings.AppState()
    assert servers.running_servers() == []
    cache.put({"a": {}})
    settings.update_state({"last": "x"})
    assert (cache.read(), settings.read_state().last) == ({"a": {}}, "x")


def test_a_key_that_is_no_text_is_not_cached(tmp_path: Path) -> None:
    """Such as the name of a file."""
    cache = JsonCache(tmp_path / "cache.json", int, version=1, max_entries=9)
    cache.put({"caf\udce9": 1})
    cache.put({"b": 2})
    assert cache.read() == {"b": 2}
