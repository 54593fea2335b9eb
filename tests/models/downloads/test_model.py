"""Tests a model's files in order: from the hub to their checked place, whatever happens on the way."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cpuchat.base.errors import AccessDenied, ChecksumMismatch, DownloadFailed, NotOnHub, RateLimited
from cpuchat.models.downloads.state import RetryPolicy
from tests.models.downloads.conftest import CONTENT, NAME, REPO, Site
from tests.support.hub_server import STRANGER, Fault, Gate, HubServer

pytestmark = pytest.mark.slow

SIZE = len(CONTENT)
WRONG = bytes(SIZE)


def fault(site: Site, *faults: Fault) -> None:
    site.hub.fault(REPO, NAME, *faults)


def run(code: str) -> str:
    """Return what a program with huggingface_hub prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


GET = f"from huggingface_hub import hf_hub_download as get; print(get({REPO!r}, {NAME!r}, local_files_only=True))"
"""Prints where the real client finds the file."""


def test_a_file_comes_to_where_huggingface_hub_looks_for_it(site: Site) -> None:
    path = site.fetch()
    assert path.read_bytes() == CONTENT
    assert path.resolve() == (site.blobs / site.files[0].sha256).resolve()
    told = run(f"{GET}; print(get({REPO!r}, {NAME!r}))\n"
               "from huggingface_hub import scan_cache_dir as s; [r] = s().repos; [v] = r.revisions; [f] = v.files; "
               "print(s().warnings, r.repo_id, v.commit_hash, *v.refs, f.file_name, f.size_on_disk)")  # fmt: skip
    assert told.splitlines() == [str(path), str(path), f"[] {REPO} {site.commit} main {NAME} {SIZE}"]
    assert site.asked() == ["bytes=0-"]


def test_the_newest_commit_only_becomes_main(site: Site) -> None:
    main = site.blobs.parent / "refs/main"
    older = replace(site.order(), newest_at=0.0)
    site.put({NAME: CONTENT, "new.txt": b"new"})
    path = site.fetch(older)
    assert path.read_bytes() == CONTENT
    assert path.parent.name == older.revision != site.commit
    assert not main.exists()
    site.files = older.model.files
    site.fetch()
    assert main.read_text() == site.commit
    # A download that went on after another program had seen a newer commit.
    site.fetch(replace(older, newest_at=1.0))
    assert main.read_text() == site.commit


@pytest.mark.parametrize("is_new", [True, False])
def test_where_links_are_impossible_the_file_itself_gets_the_name(
    site: Site, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """As huggingface_hub does it there. The variable stands for a file system such as FAT."""
    if not is_new:  # another revision holds a link to it, which must not lose its content
        older = site.fetch()
        files = site.files
        site.put({NAME: CONTENT, "new.txt": b"new"})
        site.files = files
    monkeypatch.setenv("HF_HUB_DISABLE_SYMLINKS", "1")
    path = site.fetch()
    assert path.read_bytes() == CONTENT
    assert not path.is_symlink()
    assert list(site.blobs.iterdir()) == ([] if is_new else [older.resolve()])
    before = len(site.asked())
    assert site.fetch() == path
    assert len(site.asked()) == before
    assert run(GET) == str(path)


def test_a_copy_without_a_link_is_checked_before_it_counts(site: Site) -> None:
    copy = site.blobs.parent / "snapshots" / ("d" * 40) / NAME
    copy.parent.mkdir(parents=True)
    copy.write_bytes(CONTENT)
    path = site.fetch()
    assert path.read_bytes() == CONTENT
    assert site.asked() == []
    path.unlink()
    copy.write_bytes(WRONG)
    assert site.fetch().read_bytes() == CONTENT
    assert site.asked() == ["bytes=0-"]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, SIZE // 3), min_size=1, max_size=4))
def test_a_connection_cut_anywhere_costs_no_byte_twice(site: Site, cuts: list[int]) -> None:
    before = site.hub.bytes_sent(NAME)
    (site.blobs / site.files[0].etag).unlink(missing_ok=True)
    # A try that brings something starts the count of tries anew; one cut at byte 0 brings nothing.
    fault(site, *(Fault(cut_after=cut) for cut in cuts))
    order = site.order(retry_policy=RetryPolicy(first_wait=0.0, attempts=len(cuts) + 2))
    assert site.fetch(order).read_bytes() == CONTENT
    assert site.hub.bytes_sent(NAME) - before <= SIZE * 1.01


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(Fault(status=500), id="500 of the content host"),
        pytest.param(Fault(status=403), id="a link that ran out"),
        pytest.param(Fault(page=b"<html>please log in</html>"), id="a web page"),
        pytest.param(Fault(content=CONTENT[: SIZE // 2]), id="a short file"),
        pytest.param(Fault(content=WRONG), id="other content"),
    ],
)
def test_a_fault_that_passes_is_borne(site: Site, one: Fault) -> None:
    fault(site, one, one) if one.content is not WRONG else fault(site, one)
    assert site.fetch().read_bytes() == CONTENT


def test_what_is_waited_for_is_told(site: Site) -> None:
    fault(site, Fault(status=503), Fault(status=429, retry_after="0"))
    site.fetch(site.order(retry_policy=RetryPolicy(first_wait=0.001)))
    waits = [report for report in site.reports if report.state == "waiting"]
    assert [(report.code, report.attempt) for report in waits] == [("hub", 2), ("rate_limited", 3)]
    assert "503" in waits[0].message
    assert 0 < waits[0].retry_in <= 0.001
    assert waits[1].retry_in == 0


def test_a_server_that_asks_for_too_much_patience_is_an_error(site: Site) -> None:
    fault(site, Fault(status=429, retry_after="3600", where="hub"))
    with pytest.raises(RateLimited):
        site.fetch()


def test_after_too_many_tries_without_a_byte_it_fails_and_keeps_the_part(site: Site) -> None:
    fault(site, Fault(cut_after=400_000), Fault(status=503, times=-1))
    with pytest.raises(DownloadFailed, match="503") as raised:
        site.fetch()
    assert "kept" in raised.value.hint
    assert site.part().stat().st_size == 400_000
    assert len(site.asked()) == 5  # the first one that brought something, and four that didn't
    site.hub.forget_faults()
    assert site.fetch().read_bytes() == CONTENT
    assert site.asked()[-1] == "bytes=400000-"


def test_a_server_that_falls_silent_is_given_up(site: Site) -> None:
    fault(site, Fault(gate=Gate(at=300_000)))
    assert site.fetch(site.order(retry_policy=RetryPolicy(first_wait=0.0, idle_timeout=2.0))).read_bytes() == CONTENT
    assert site.asked()[0] == "bytes=0-" and len(site.asked()) > 1


def test_a_server_without_ranges_sends_all_of_it_again(site: Site) -> None:
    fault(site, Fault(cut_after=500_000), Fault(ignore_range=True))
    assert site.fetch().read_bytes() == CONTENT


def test_a_wrong_content_twice_is_thrown_away(site: Site) -> None:
    fault(site, Fault(content=WRONG, times=-1))
    with pytest.raises(ChecksumMismatch):
        site.fetch()
    assert list(site.blobs.iterdir()) == []
    assert len(site.asked()) == 2
    assert [state for state, _ in itertools.groupby(one.state for one in site.reports)] == ["running", "checking"] * 2


def test_a_damaged_part_is_found_and_fetched_anew(site: Site) -> None:
    site.blobs.mkdir(parents=True)
    site.part().write_bytes(bytes(1000) + CONTENT[1000:500_000])
    assert site.fetch().read_bytes() == CONTENT
    assert site.asked() == ["bytes=500000-", "bytes=0-"]


def test_the_parts_of_a_split_model_come_one_after_the_other(site: Site) -> None:
    names = [f"BF16/big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    site.put({name: random.Random(n).randbytes(200_000) for n, name in enumerate(names)})
    site.hub.fault(REPO, names[2], Fault(where="hub", status=404, error_code="EntryNotFound"))
    with pytest.raises(NotOnHub):
        site.fetch()
    assert site.reports[-1].done == 400_000
    verified = site.reports[-1].verified
    assert verified == tuple(file.etag for file in site.files[:2])
    site.reports.clear()
    first = site.fetch(verified=verified)
    assert site.reports[0].done == 400_000
    assert first.name == "big-00001-of-00003.gguf"
    assert [path.name for path in sorted(first.parent.iterdir())] == [name.split("/")[1] for name in names]
    assert site.asked() == ["bytes=0-"] * 3


@pytest.mark.parametrize("token", [None, STRANGER])
def test_a_gated_repository_needs_a_token_with_access(
    hub_server: HubServer, site: Site, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    site.put({NAME: CONTENT}, repo="meta/gated", gated=True)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(AccessDenied) as raised:
        site.fetch(site.order(repo="meta/gated"))
    assert raised.value.hint
    assert "hf_" not in str(raised.value)
    assert len(hub_server.requests) == 1
