"""Tests the processes that this package starts: no code from the current folder, no secrets for those that compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cpuchat.base import processes
from cpuchat.hardware.diagnostics import refused_policy
from cpuchat.measure import peak
from cpuchat.models.quantize.types import QuantizeProcess
from cpuchat.models.synthetic.model import write_model
from tests.cli.program import HANG_GUARD, PLAIN
from tests.support.chatting import chat, collect, worker
from tests.support.hub_server import HubServer
from tests.support.shapes import TINY_LLAMA
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.slow

# Standard library, dependencies and the package itself: whatever a child imports first.
TRAPS = (
    "argparse", "asyncio", "codecs", "contextlib", "ctypes", "cpuchat", "dataclasses", "datetime", "hashlib",
    "huggingface_hub", "httpx", "jinja2", "json", "llama_cpp", "math", "mmap", "msgspec", "numpy", "psutil", "queue",
    "resource", "runpy", "signal", "socket", "ssl", "struct", "subprocess", "tempfile", "threading", "traceback",
    "typing", "zlib",
)  # fmt: skip
SECRETS = {
    "HF_TOKEN": "hf_of_a_user", "HUGGING_FACE_HUB_TOKEN": "hf_of_a_user_too", "OPENAI_API_KEY": "sk-secret",
    "AWS_SECRET_ACCESS_KEY": "aws-secret", "CPUCHAT_API_KEY": "our-secret", "LLAMA_API_KEY": "llama-secret",
    "PGPASSWORD": "db-secret",
}  # fmt: skip


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """Return a folder in which every module leaves a mark when it is executed."""
    folder = tmp_path / "trapped"
    folder.mkdir()
    for name in TRAPS:
        mark = f"import os; open({str(tmp_path / 'sprung')!r}, 'a').write('{name} ' + ' '.join(os.sys.argv) + chr(10))"
        (folder / f"{name}.py").write_text(f"{mark}\nraise SystemExit(99)\n")
    return folder


def run_in(folder: Path, *arguments: str) -> None:
    """Run as the installed program does, with its own folder first on the path."""
    command = [sys.executable, "-P", "-m", "cpuchat.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, input=b"", capture_output=True, timeout=HANG_GUARD)
    assert done.returncode == 0, done.stderr.decode()


def test_no_command_executes_code_from_the_current_folder(
    trapped: Path, tiny_model: Path, tmp_path: Path, hub_server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher, the worker and its template's helper; those that measure, quantize, download and try a policy."""
    hub_server.add("some/tiny-GGUF", {"tiny-Q4_K_M.gguf": tiny_model.read_bytes()})
    half = write_model(tmp_path / "llama-F16.gguf", TINY_LLAMA, "F16")
    launched = ("--memory-policy", "bind:0") if sys.platform == "linux" else ()
    run_in(trapped, "ask", "--model", str(tiny_model), *PLAIN, *launched, "--max-tokens", "4", "Hello")
    run_in(trapped, "models", "quantize", str(half), "q8_0")
    run_in(trapped, "models", "download", "some/tiny-GGUF")
    monkeypatch.chdir(trapped)
    monkeypatch.setattr(peak, "buffer_bytes", lambda *_: 2 << 20)
    peak.measure((min(os.sched_getaffinity(0)),), seconds=0.05, rounds=1)
    assert refused_policy("bind:0") == ""
    sprung = tmp_path / "sprung"
    assert not sprung.exists(), sprung.read_text()


def test_the_oom_killer_is_named_where_the_kernel_counted_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vmstat, said = tmp_path / "vmstat", list[str]()
    monkeypatch.setattr(processes, "_VMSTAT", vmstat)
    monkeypatch.setattr(processes, "_known_oom_kills", 3)
    for kills in (3, 4, 4):
        vmstat.write_text(f"pgfault 7\noom_kill {kills}\npgsteal 1\n")
        said.append(processes.exit_reason(-9, ""))
    assert said == [killed := "killed by SIGKILL", f"{killed}, probably by the OOM killer", killed]


def environments(of: int | None) -> list[str]:
    """Return the environments of a process and its children."""
    process = psutil.Process(of)
    return ["\n".join(one.environ().values()) for one in (process, *process.children(recursive=True))]


async def test_what_reads_strangers_files_is_given_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LC_TIME", "words-for-the-worker")
    model = write_tiny_gguf(tmp_path / "tiny-F32.gguf")
    async with worker(model) as backend:
        await collect(backend.generate(chat("hello")))
        found = environments(backend.pid)
    assert len(found) > 1  # the template's helper is among them
    assert "words-for-the-worker" in found[0]
    before = set(psutil.Process().children())
    async with QuantizeProcess():
        found += [one for child in set(psutil.Process().children()) - before for one in environments(child.pid)]
    assert len(found) > 2
    assert not [value for value in SECRETS.values() for one in found if value in one]
    assert os.environ["HF_TOKEN"] == SECRETS["HF_TOKEN"]
