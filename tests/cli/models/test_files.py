"""Tests `cpuchat models files` as a user runs it, against a local hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cpuchat.base.errors import NotOnHub, UsageError
from cpuchat.models.fit import draft_memory, plan_memory
from cpuchat.models.gguf.header import read_header
from cpuchat.protocol.messages import LoadOptions
from tests.cli.program import run
from tests.support.hub_server import HubServer

REPO = "some/Tiny-GGUF"


@pytest.fixture
def hub(hub_server: HubServer, tiny_model: Path) -> HubServer:
    """A repository with one sound model and all that can stand beside it."""
    content = tiny_model.read_bytes()
    hub_server.add(
        REPO,
        {
            "Tiny-F32.gguf": content,
            "Tiny-Q8_0.gguf": b"no model at all",
            "BF16/Tiny-BF16-00001-of-00002.gguf": content[:5000],
            "mmproj-F16.gguf": b"GGUF of the image part",
            "../../evil.gguf": b"x",
            "README.md": b"# Tiny",
        },
        cardData={"license": "apache-2.0"},
    )
    return hub_server


def rows(*options: str) -> dict[str, dict[str, Any]]:
    done = run("models", "files", REPO, "--json", *options)
    assert done.returncode == 0, done.stdout
    return {row["name"]: row for row in json.loads(done.stdout)["models"]}


def test_the_table_has_fit_and_faults_by_quantization(hub: HubServer) -> None:
    done = run("models", "files", REPO)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{REPO} · apache-2.0 · 2025-11-03"
    by_name = {line.split()[0]: line for line in lines if line}
    assert " fits " in by_name["F32"]
    assert " damaged" in by_name["Q8_0"]
    assert " incomplete" in by_name["BF16"]
    assert "mmproj-F16.gguf" in by_name["projector:"]
    assert "FIT with 4,096 tokens of context" in done.stdout
    assert "TOK/S: " in done.stdout
    assert "unsafe name" in done.stdout


def test_the_need_is_what_the_engine_counts_before_it_loads(hub: HubServer, tiny_model: Path) -> None:
    header = read_header(tiny_model)
    options = LoadOptions(n_ctx=1024)
    row = rows("--ctx", "1024")["Tiny-F32"]
    assert row["prediction"]["exact"]
    assert row["prediction"]["needed"] == plan_memory(header, options, 1 << 40)[0].min_bytes
    assert row["prediction"]["n_ctx"] == 1024
    with_draft = rows("--ctx", "1024", "--draft", str(tiny_model))["Tiny-F32"]
    assert (
        with_draft["prediction"]["needed"] - row["prediction"]["needed"]
        == draft_memory(header, options, 1024).min_bytes
    )


def test_a_draft_model_may_be_on_the_hub(hub: HubServer, tiny_model: Path) -> None:
    hub.add("other/Draft-GGUF", {"Draft-Q8_0.gguf": tiny_model})
    counted = rows("--draft", "other/Draft-GGUF:Q8_0")["Tiny-F32"]["prediction"]["needed"]
    assert counted == rows("--draft", str(tiny_model))["Tiny-F32"]["prediction"]["needed"]
    done = run("models", "files", REPO, "--draft", "other/Draft-GGUF:Q2_K")
    assert done.returncode == NotOnHub.exit_code
    assert "Available: Q8_0." in done.stderr


def test_the_header_of_the_quantization_that_was_named_is_read(hub_server: HubServer, tiny_model: Path) -> None:
    content = tiny_model.read_bytes()
    hub_server.add(REPO, {"Tiny-Q4_K_M.gguf": content, "Tiny-Q8_0.gguf": content + b"1"})
    for named in (f"{REPO}:q8_0", f"{hub_server.endpoint}/{REPO}/blob/main/Tiny-Q8_0.gguf"):
        done = run("models", "files", named, "--json")
        exact = [row["name"] for row in json.loads(done.stdout)["models"] if row["prediction"]["exact"]]
        assert exact == ["Tiny-Q8_0"]
    assert hub_server.bytes_sent("Tiny-Q4_K_M.gguf") == 0


def test_a_second_look_reads_no_header_again(hub: HubServer) -> None:
    first = rows()["Tiny-F32"]
    sent = hub.bytes_sent("Tiny-F32.gguf")
    assert rows()["Tiny-F32"]["prediction"]["needed"] == first["prediction"]["needed"]
    assert hub.bytes_sent("Tiny-F32.gguf") == sent


def test_without_headers_only_the_list_is_asked_for(hub: HubServer) -> None:
    row = rows("--no-header")["Tiny-F32"]
    assert not row["prediction"]["exact"]
    assert [request.host for request in hub.requests] == ["hub"]
    done = run("models", "files", REPO, "--no-header")
    assert "≈ fits" in done.stdout


def test_a_gated_repository_is_judged_by_sizes_and_says_how_to_be_let_in(
    hub_server: HubServer, tiny_model: Path
) -> None:
    hub_server.add(REPO, {"Tiny-F32.gguf": tiny_model}, gated=True)
    done = run("models", "files", REPO)
    assert done.returncode == 0, done.stderr
    assert "≈ fits" in done.stdout
    assert f"Accept them at {hub_server.endpoint}/{REPO}, then run `hf auth login`" in done.stdout


def test_what_is_here_already_is_marked(hub: HubServer, tiny_model: Path) -> None:
    blobs = Path(os.environ["HF_HOME"]) / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{hub.etag(REPO, 'Tiny-F32.gguf')}.incomplete"
    size = tiny_model.stat().st_size
    part.write_bytes(bytes(size // 4 + 1))
    assert rows()["Tiny-F32"]["here"] == size // 4 + 1
    assert "25 %" in run("models", "files", REPO).stdout
    part.with_suffix("").write_bytes(tiny_model.read_bytes())
    line = next(line for line in run("models", "files", REPO).stdout.splitlines() if line.startswith("F32"))
    assert line.endswith("yes")


def test_models_of_one_quantization_are_told_apart_by_their_names(hub_server: HubServer) -> None:
    hub_server.add(REPO, {"small-Q8_0.gguf": b"1", "large-Q8_0.gguf": b"22", "large-Q4_K_M.gguf": b"333"})
    lines = run("models", "files", REPO, "--no-header").stdout.splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["small-Q8_0", "large-Q8_0", "Q4_K_M"]


def test_hostile_names_never_reach_the_terminal(hub_server: HubServer) -> None:
    hub_server.add(REPO, {"a\x1b]0;owned\x07.gguf": b"1", "b.gguf": b"2"}, cardData={"license": "mit\x1b[31m"})
    done = run("models", "files", REPO, "--no-header")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout


def test_a_link_with_a_revision_and_an_empty_repository(hub_server: HubServer) -> None:
    old = hub_server.add(REPO, {"old-Q8_0.gguf": b"1"})
    hub_server.add(REPO, {"README.md": b"moved"})
    link = f"{hub_server.endpoint}/{REPO}/tree"
    assert "Q8_0" in run("models", "files", f"{link}/{old}", "--no-header").stdout
    assert "Q8_0" in run("models", "files", REPO, "--revision", old, "--no-header").stdout
    assert "Q8_0" in run("models", "files", f"{link}/{old}/folder", "--no-header").stdout
    assert "no GGUF model" in run("models", "files", f"{link}/main").stderr


def test_a_name_that_is_none_is_wrong_usage(hub_server: HubServer) -> None:
    assert run("models", "files", "qwen").returncode == UsageError.exit_code
    assert run("models", "files", REPO, "--no-header", "--draft", "demo-draft").returncode == UsageError.exit_code
    assert hub_server.requests == []


def test_a_repository_that_is_not_there_has_its_own_exit_code(hub_server: HubServer) -> None:
    done = run("models", "files", "some/missing-GGUF")
    assert done.returncode == NotOnHub.exit_code
    assert "cpuchat models search missing-GGUF" in done.stderr
