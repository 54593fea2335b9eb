"""Tests the built-in tools: what they return, and that nothing outside the folder is read."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.protocol.messages import ToolCall
from cpuchat.tools import folder as module
from cpuchat.tools.folder import TOOLS, Folder

SECRET = "the password"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "notes.txt").write_text(SECRET)
    root = tmp_path / "root"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "notes.md").write_text("one\nTwo words\nthree\n")
    (root / "src" / "main.py").write_text("def two():\n    return 2\n")
    (root / "src" / "deep" / "data.bin").write_bytes(b"two\0two")
    (root / ".env").write_text(SECRET)
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text(SECRET)
    (root / "server.pem").write_text(SECRET)
    (root / "away").symlink_to(tmp_path / "outside")
    (root / "file-away").symlink_to(tmp_path / "outside" / "notes.txt")
    (root / "inside").symlink_to(root / "src")
    os.mkfifo(root / "pipe")
    return root


@pytest.fixture
def folder(root: Path) -> Iterator[Folder]:
    folder = Folder(root)
    yield folder
    folder.release()


def told(folder: Folder, name: str, failed: bool = False, **arguments: Any) -> str:
    result = folder.result(ToolCall(name=name, arguments=arguments))
    assert result.failed is failed, result.text
    assert SECRET not in result.text
    return result.text


def test_files_are_read_whole_or_in_part(folder: Folder, root: Path) -> None:
    assert told(folder, "read_file", path="notes.md") == "one\nTwo words\nthree"
    assert told(folder, "read_file", path=f"{root}/src/main.py").startswith("def two")
    assert told(folder, "read_file", path="./notes.md", first_line="2", last_line=2) == "Lines 2-2 of 3:\nTwo words"
    assert told(folder, "read_file", path="notes.md", first_line=3, last_line=99) == "Lines 3-3 of 3:\nthree"
    assert told(folder, "read_file", failed=True, path="notes.md", first_line=9) == "No such lines: it has 3 lines."
    (root / "long").write_text("line\n" * 5_000)
    assert told(folder, "read_file", path="long").startswith("Lines 1-2000 of 5,000:\nline\n")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../outside/notes.txt", "Only what is in the folder"),
        ("src/../../outside/notes.txt", "Only what is in the folder"),
        ("/etc/passwd", "Only what is in the folder"),
        ("away/notes.txt", "links are not followed"),
        ("file-away", "links are not followed"),
        ("inside/main.py", "links are not followed"),
        (".env", "keys or passwords"),
        (".git/config", "keys or passwords"),
        ("server.pem", "keys or passwords"),
        ("SERVER.PEM", "keys or passwords"),
        ("gone", "No such file"),
        ("src", "not a file"),
        ("", "not a file"),
        ("pipe", "not a file"),
        ("src/deep/data.bin", "binary file"),
        ("notes.md/more", "Not a directory"),
        ("a\0b", "Cannot read it"),
    ],
)
def test_what_cannot_be_read_is_told(folder: Folder, path: str, reason: str) -> None:
    n_open = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    assert reason in told(folder, "read_file", failed=True, path=path)
    if n_open:
        assert len(list(Path("/proc/self/fd").iterdir())) == n_open


def test_folders_are_listed(folder: Folder) -> None:
    lines = told(folder, "list_folder").splitlines()
    assert lines == ["away  (link)", "file-away  (link)", "inside  (link)", "notes.md  20 B", "pipe  0 B", "src/"]
    assert told(folder, "list_folder", path="src/deep") == "data.bin  7 B"
    assert "not a folder" in told(folder, "list_folder", failed=True, path="notes.md")


def test_search_finds_text_in_files_of_the_folder(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(folder, "search", text="TWO").splitlines() == ["notes.md:2: Two words", "src/main.py:1: def two():"]
    assert told(folder, "search", text="two", path="src", file_name="*.py") == "src/main.py:1: def two():"
    assert told(folder, "search", text="(two", file_name="*.md") == "Not found in 1 file."
    assert told(folder, "search", text=SECRET[:4]).startswith("Not found")
    assert "empty" in told(folder, "search", failed=True, text=" ")
    monkeypatch.setattr(module, "MAX_HITS", 1)
    assert told(folder, "search", text="two").splitlines()[-1] == "… stopped after 1 file: narrow the search"
    monkeypatch.setattr(module, "SEARCH_SECONDS", -1.0)
    assert told(folder, "search", text="two", file_name="none") == "… stopped after 0 files: narrow the search"


def test_a_deep_folder_is_searched(folder: Folder, root: Path) -> None:
    handle = os.open(root, os.O_RDONLY)
    for _ in range(1_200):
        os.mkdir("d", dir_fd=handle)
        inner = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    with os.fdopen(os.open("deep.txt", os.O_WRONLY | os.O_CREAT, dir_fd=handle), "w") as file:
        file.write("the bottom\n")
    os.close(handle)
    try:
        assert told(folder, "search", text="bottom") == f"{'d/' * 1_200}deep.txt:1: the bottom"
        assert told(folder, "read_file", path=f"{'d/' * 1_200}deep.txt") == "the bottom"
    finally:
        subprocess.run(["rm", "-r", str(root / "d")], check=True)  # deeper than pytest can delete


def test_keys_and_cpuchats_own_files_are_never_read(
    folder: Folder, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {kind: root / "home" / kind for kind in ("CONFIG", "DATA", "CACHE")}
    for kind, place in own.items():
        place.mkdir(parents=True)
        (place / "any.txt").write_text(SECRET)
        monkeypatch.setenv(f"CPUCHAT_{kind}_DIR", str(place))
    (dotfiles := root / "dotfiles").mkdir()
    (dotfiles / "servers.json").write_text(SECRET)
    (own["CONFIG"] / "mcp.json").symlink_to(dotfiles / "servers.json")
    (own["DATA"] / "keys.toml").write_text(SECRET)
    os.link(own["DATA"] / "keys.toml", root / "copy.toml")
    (hub := root / "hub").mkdir()
    (hub / "token").write_text(SECRET)
    (hub / "stored_tokens").write_text(SECRET)
    monkeypatch.setenv("HF_HOME", str(hub))
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    for name in (".bash_history", ".python_history", ".lesshst", "MCP.json", "credentials", ".ſsh"):
        (root / name).write_text(SECRET)
        assert "keys or passwords" in told(folder, "read_file", failed=True, path=name)
    private = [f"home/{kind}/any.txt" for kind in own]
    for path in (*private, "dotfiles/servers.json", "copy.toml", "hub/token", "hub/stored_tokens"):
        assert "keys or passwords" in told(folder, "read_file", failed=True, path=path), path
    assert "keys or passwords" in told(folder, "list_folder", failed=True, path="home/DATA")
    assert told(folder, "search", text=SECRET[:5]).startswith("Not found in ")
    (tmp_path / "link").symlink_to(own["DATA"])
    (inner := own["CACHE"] / "logs").mkdir()
    for place in (own["CONFIG"], tmp_path / "link", inner, root / ".git"):
        with pytest.raises(UsageError, match="may hold keys or passwords"):
            Folder(place)


def test_wrong_calls_are_told(folder: Folder) -> None:
    assert "path" in told(folder, "read_file", failed=True)
    assert "unknown field" in told(folder, "read_file", failed=True, path="notes.md", mode="w")
    assert "There is no tool" in told(folder, "delete_file", failed=True, path="notes.md")
    assert folder.result(ToolCall(name="search", problem="No object.")).text == "No object."
    assert all(tool.read_only for tool in TOOLS)


@pytest.mark.parametrize("name", ["notes.md", "gone"])
def test_a_folder_that_is_none_is_refused(root: Path, name: str) -> None:
    with pytest.raises(UsageError, match="Cannot open the folder"):
        Folder(root / name)
