"""Provides fixtures for all packages."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cpuchat.config import settings as user_settings
from cpuchat.config.servers import ServerModel
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.hardware.topology import Instructions
from cpuchat.measure.peak import ReadBandwidth, keep
from tests.hardware import trees
from tests.support.cores import ON_ONE_CPU
from tests.support.hub_server import HubServer
from tests.support.llama_server import llama_server
from tests.support.tiny_gguf import write_tiny_gguf

# The processes that tests start shall run the code that is tested, wherever the installed package lies.
_ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))


def pytest_configure() -> None:
    """Restore SIGINT for the programs that tests interrupt: a shell's background job ignores it, and children inherit
    that. Tries fewer made-up examples than hypothesis would, however long each takes: the machine may be busy."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("short", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("short")
    gc.disable()  # importing all tests makes next to no garbage


def pytest_collection_finish() -> None:
    """Keep collections from walking all modules and tests again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


LONG = (
    "e2e", "worker", "cli", "tui", "backend", "serving", "tune", "bench", "compare", "quality", "speech",
    "test_wheel.py", "engine", "kernels",
)  # fmt: skip
"""Rooms whose files take long, and two files; begun late, one of them would run alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    room = {item: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    items.sort(key=lambda item: LONG.index(room[item]) if room[item] in LONG else len(LONG))


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of a run share, for what takes long to write: machines of thousands of files,
    models of a hundred megabytes."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    trees.originals = folder
    return folder


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own folders for settings, chats and caches, and no models of other programs."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for kind in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"CPUCHAT_{kind}_DIR", str(tmp_path / kind.lower()))
    monkeypatch.setenv("COLORTERM", "truecolor")  # whatever the terminal of the tests has
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "TMUX", "WSL_DISTRO_NAME", "SSH_TTY", "SSH_CONNECTION", "TERM_PROGRAM"):
        monkeypatch.delenv(name, raising=False)  # nobody's clipboard
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def measured_machine(own_folders: None) -> None:
    """Provide a machine whose read bandwidth was measured: 40 GB/s, for all its CPUs and for each."""
    cpus = own_cpus()
    for some in {tuple(cpus), *((cpu,) for cpu in cpus)}:
        keep(ReadBandwidth(some, 40e9, (40e9,), (1.0,) * len(some)))


@pytest.fixture
def one_core(own_folders: None) -> None:
    """Let programs load models on one core unless they are told otherwise (see support.cores)."""
    user_settings.update({"engine": {"cores": ON_ONE_CPU.cores}})


@pytest.fixture
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute memory as on most x86 CPUs: AMX repacks more weights."""
    cpu = Instructions(frozenset({"AVX2", "AVX512", "AVX512_VNNI"}))
    monkeypatch.setattr("cpuchat.models.fit.engine_cpu", lambda _: cpu)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model of the llama architecture with random weights and a ChatML template, context 4096."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny-F32.gguf")


@pytest.fixture(scope="session")
def served_model(tiny_model: Path) -> Iterator[ServerModel]:
    """The tiny model on a llama-server of this machine, context 2048."""
    with llama_server(tiny_model, n_ctx=2048) as url:
        yield ServerModel(url)


@pytest.fixture(scope="session")
def tiny_model_without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same model without a chat template."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "plain-F32.gguf", with_template=False)


@pytest.fixture
def hub_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Yield a local hub, the only one in the environment of this process and its children, with an empty HF_HOME."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    # Read when it was imported: the user's own token must not be sent.
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "hf_home" / "token"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
