"""Tests one file's bytes, on from any offset."""

from __future__ import annotations

from pathlib import Path

from cpuchat.models.downloads.child import transfer
from tests.models.downloads.conftest import REPO, Site

MIB = 1 << 20


def test_a_file_of_sixty_gigabytes_goes_on_near_its_end(site: Site, tmp_path: Path) -> None:
    size = 60_000_000_000
    huge = tmp_path / "huge.gguf"
    with huge.open("wb") as stream:
        stream.truncate(size)  # holes: no room is taken
        stream.seek(size - MIB)
        stream.write(b"the end" * 1000)
    site.put({"huge.gguf": huge})
    site.blobs.mkdir(parents=True)
    with site.part().open("wb") as stream:
        stream.truncate(size - MIB)
    seen: list[int] = []
    transfer(REPO, site.commit, site.files[0], site.part(), idle_timeout=10, on_written=seen.append)
    assert site.asked() == [f"bytes={size - MIB}-"]
    assert seen[0] == size - MIB
    assert seen[-1] == site.part().stat().st_size == size
    with site.part().open("rb") as stream:
        stream.seek(size - MIB)
        assert stream.read(7000) == b"the end" * 1000
