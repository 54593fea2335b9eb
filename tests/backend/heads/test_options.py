"""Tests how a llama-server is started for a draft head."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from cpuchat.backend.heads.server import ServerDraftOptions, ServerOptions, command, cpu_mask
from cpuchat.base.errors import EngineMissing
from cpuchat.models.heads import find_program
from cpuchat.protocol.messages import LoadOptions, Speculation

SERVER = ServerOptions(
    program="/usr/bin/llama-server", model="/m.gguf", head="/eagle3.gguf", kind="eagle3", port=8123, n_ctx=4096,
    cache_mib=300, drafting=ServerDraftOptions(4), cpus=(0, 1, 3),
    options=LoadOptions(n_batch=256, n_ubatch=512, poll=10, type_k="q8_0", use_repack=False),
)  # fmt: skip


def test_the_command_line_has_cores_threads_and_the_head() -> None:
    words = command(SERVER)
    given = dict(itertools.pairwise(words))
    assert words[0] == "/usr/bin/llama-server"
    wanted = {
        "--model": "/m.gguf", "--host": "127.0.0.1", "--port": "8123", "--ctx-size": "4096", "--parallel": "1",
        "--threads": "3", "--threads-batch": "3", "--cpu-mask": "b", "--cpu-strict": "1", "--poll": "0",
        "--batch-size": "256", "--ubatch-size": "256", "--cache-type-k": "q8_0", "--cache-type-v": "f16",
        "--spec-type": "draft-eagle3", "--spec-draft-model": "/eagle3.gguf", "--device": "none", "--cache-ram": "300",
        "--spec-draft-n-max": "4", "--spec-draft-device": "none",
    }  # fmt: skip
    assert {name: given[name] for name in wanted} == wanted
    assert "--no-repack" in words and "--load-mode" not in words
    assert not any("key" in word for word in words)  # other users would see it


def test_a_head_in_the_model_is_no_file() -> None:
    words = command(msgspec.structs.replace(SERVER, head="", kind="mtp"))
    assert "draft-mtp" in words and "--spec-draft-model" not in words


def test_the_settings_decide_how_it_drafts() -> None:
    auto = Speculation(drafters=("suffix", "draft"))
    assert ServerDraftOptions.of(auto, "mtp").depth == 2
    assert ServerDraftOptions.of(msgspec.structs.replace(auto, depth=5), "mtp") == ServerDraftOptions(5)
    off = ServerDraftOptions.of(Speculation(drafters=("suffix",), depth=5), "mtp")
    assert not any(word.startswith("--spec") for word in command(msgspec.structs.replace(SERVER, drafting=off)))


@pytest.mark.parametrize(("cpus", "mask"), [((0,), "1"), ((4, 5, 6, 7), "f0"), ((0, 64), "10000000000000001")])
def test_cpus_become_a_mask(cpus: tuple[int, ...], mask: str) -> None:
    assert cpu_mask(cpus) == mask


def test_the_program_is_found_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineMissing) as caught:
        find_program()
    assert "Install llama.cpp" in caught.value.hint and caught.value.exit_code == 9
    program = tmp_path / "llama-server"
    program.touch(0o755)
    program.chmod(0o755)
    assert find_program() == str(program)
