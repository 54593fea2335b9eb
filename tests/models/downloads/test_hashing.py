"""Tests the hash of a file that grows, against hashlib and git's definition."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cpuchat.models.downloads.hf_cache import FollowingHash
from cpuchat.models.hub.repository import HubFile
from tests.models.downloads.conftest import CONTENT

SIZE = len(CONTENT)
LFS = HubFile(path="a.gguf", size=SIZE, sha256=hashlib.sha256(CONTENT).hexdigest())
GIT = HubFile(path="a.gguf", size=SIZE, git_sha1=hashlib.sha1(b"blob %d\0" % SIZE + CONTENT).hexdigest())


def nothing(_count: int) -> None:
    """Ignore progress."""


@pytest.mark.parametrize("file", [LFS, GIT])
def test_it_follows_a_file_that_grows(tmp_path: Path, file: HubFile) -> None:
    path = tmp_path / "part"
    counts: list[int] = []
    with FollowingHash(path, file, counts.append) as following, path.open("ab", buffering=0) as stream:
        for start in range(0, SIZE, 99_999):
            stream.write(CONTENT[start : start + 99_999])
            following.on_written(stream.tell())
        assert following.digest() == file.etag
    assert counts == sorted(counts)
    assert counts[-1] == SIZE


def test_it_hashes_what_the_disk_holds(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(bytes(SIZE))
    with FollowingHash(path, LFS, nothing) as following:
        following.on_written(SIZE)
        assert following.digest() == hashlib.sha256(bytes(SIZE)).hexdigest()


def test_it_can_be_left_at_any_point(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(CONTENT)
    with FollowingHash(path, LFS, nothing):
        pass
    with FollowingHash(path, LFS, nothing) as following:
        following.on_written(1000)


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(CONTENT[:1000])
    with FollowingHash(path, LFS, nothing) as following:
        following.on_written(SIZE)
        with pytest.raises(OSError, match="truncated"):
            following.digest()
