"""Tests `cpuchat models download` as a user runs it, against a local hub."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from cpuchat.base.errors import Declined, DiskFull, Interrupted, UsageError
from tests.cli.program import refused, run, succeeded
from tests.models.drafts.files import write_catalog
from tests.support.edited_gguf import edited
from tests.support.hub_server import Fault, Gate, HubServer
from tests.support.terminal import Terminal

REPO = "some/Tiny-GGUF"
NAME = "Tiny-Q4_K_M.gguf"
HEAD = "eagle3-Tiny-Q8_0.gguf"


@pytest.fixture
def hub(hub_server: HubServer, tiny_model: Path) -> HubServer:
    """A repository with two quantizations and a draft head."""
    content = tiny_model.read_bytes()
    files = {NAME: content, "Tiny-Q8_0.gguf": content + b"\0" * 64, "README.md": b"# Tiny", HEAD: content}
    hub_server.add(REPO, files)
    return hub_server


@pytest.mark.usefixtures("measured_machine", "one_core")
def test_the_path_is_the_answer_and_the_model_can_be_used(hub: HubServer, tiny_model: Path) -> None:
    done = succeeded("models", "download", REPO)
    path = Path(done.stdout.strip())
    assert path.name == NAME
    assert path.read_bytes() == tiny_model.read_bytes()
    assert "fits" in done.stderr
    assert f"-m {REPO}:Q4_K_M" in done.stderr
    succeeded("ask", "--model", f"{REPO}:Q4_K_M", "--max-tokens", "1", "Hello")
    done = run("models", "download", f"{REPO}:{HEAD.removesuffix('.gguf')}")
    head = done.stdout.strip()
    assert Path(head).name == HEAD and "  EAGLE-3 head\n" in done.stderr
    assert f"--draft-model {head}" in done.stderr


def test_a_model_of_the_catalog_goes_by_its_id(hub: HubServer, tiny_model: Path) -> None:
    write_catalog(("tiny", "Tiny", 0.001, []))
    content = tiny_model.read_bytes()
    hub.add("owner/Tiny-GGUF", {NAME: content, "Tiny-Q8_0.gguf": content + b"\0" * 64})
    for name, file in (("tiny", NAME), (" TINY:q8_0", "Tiny-Q8_0.gguf")):
        done = succeeded("models", "download", name)
        assert Path(done.stdout.strip()).name == file
    assert "architecture" in run("models", "show", "tiny:Q8_0").stdout
    told = refused(UsageError.exit_code, "models", "download", "qwen3-8")
    assert "Did you mean qwen3-8b" in told and "models catalog" in told


def test_faults_on_the_way_to_the_file_of_a_link_are_told_and_borne(hub: HubServer) -> None:
    name, commit = "Tiny-Q8_0.gguf", hub.commit(REPO)
    of_the_header = Fault()  # none
    hub.fault(REPO, name, of_the_header, Fault(cut_after=100_000), Fault(status=503, retry_after="0"))
    done = succeeded("models", "download", f"{hub.endpoint}/{REPO}/blob/{commit}/{name}", "--json")
    assert "503" in done.stderr
    told = json.loads(done.stdout)
    assert (told["repo"], told["revision"], told["quantization"]) == (REPO, commit, "Q8_0")
    assert Path(told["path"]).stat().st_size == told["size"]
    assert told["files"][0]["sha256"] == hub.etag(REPO, name)


def test_in_a_terminal_a_line_shows_how_far_it_is_and_ctrl_c_keeps_that(
    hub: HubServer, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))  # where a terminal's home has it
    gate, of_the_header = Gate(at=200_000), Fault()
    hub.fault(REPO, NAME, of_the_header, Fault(gate=gate))
    with closing(Terminal(["models", "download", REPO], home=tmp_path, columns=50)) as shown:
        screen = shown.wait_for(f"{100 * gate.at // tiny_model.stat().st_size} %")
        assert max(len(line) for line in screen.splitlines()) <= 50
        shown.press("ctrl+c")
        assert shown.wait_for_end() == Interrupted.exit_code
    assert b"the partial file is kept" in shown.raw
    assert b"Traceback" not in shown.raw
    before = hub.bytes_sent(NAME)
    succeeded("models", "download", f"{REPO}:q4_k_m")
    assert hub.bytes_sent(NAME) - before == 2 * tiny_model.stat().st_size - gate.at  # all of it for the header, too


@pytest.fixture
def huge(hub: HubServer, tmp_path: Path) -> str:
    """Add a repository with a model too large for any machine and for the disk."""
    file = tmp_path / "huge.gguf"
    with file.open("wb") as stream:
        stream.truncate(8_000_000_000_000)  # holes
    hub.add("some/Huge-GGUF", {"Huge-Q4_K_M.gguf": file})
    return "some/Huge-GGUF"


def test_what_is_too_large_for_the_machine_is_asked_about(huge: str, tmp_path: Path) -> None:
    with closing(Terminal(["models", "download", huge], home=tmp_path)) as shown:
        shown.wait_for("Download it anyway?")
        shown.type("n\r")
        shown.wait_for("Nothing was downloaded")
        assert shown.wait_for_end() == Declined.exit_code


def test_without_anybody_to_ask_it_needs_a_word(huge: str) -> None:
    assert "--yes" in refused(UsageError.exit_code, "models", "download", huge)
    assert "GB free" in refused(DiskFull.exit_code, "models", "download", huge, "--yes")


def test_what_the_engine_does_not_know_is_told_before_anything_is_downloaded(
    hub: HubServer, tmp_path: Path, tiny_model: Path
) -> None:
    content = edited(tiny_model, tmp_path / "new.gguf", {"general.architecture": "llama77"}).read_bytes()
    hub.add("some/New-GGUF", {"New-Q8_0.gguf": content})
    told = refused(UsageError.exit_code, "models", "download", "some/New-GGUF")
    assert "needs a newer engine" in told and "--yes" in told
