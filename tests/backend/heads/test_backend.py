"""Tests a llama-server of cpuchat's own as one more engine on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from cpuchat.backend.heads.server import MODULE, ServerDraftOptions, ServerOptions, free_port
from cpuchat.backend.switching import SwitchingBackend
from cpuchat.base import paths
from cpuchat.base.errors import EngineMissing
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.gguf.header import read_header
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.models.synthetic.model import shape_of
from cpuchat.protocol.messages import LoadCancelled, LoadOptions, ModelLoaded, Speculation, TextDelta
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.telemetry.speculation import SpeculationMeter
from tests.support import head_server
from tests.support.chatting import chat, collect, load
from tests.support.eagle3 import write_eagle3
from tests.support.head_files import tap_head_file
from tests.support.pair_files import write_pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the program of these tests needs signal.pause and affinity"),
]
DEMO, DRAFT = (paths.demo_dir() / DEMO_FILES[name] for name in ("demo", "demo-draft"))
DRAFTING = Speculation(drafters=("suffix", "draft"))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """Return a head that fits the demo model by its header."""
    demo = read_header(DEMO)
    file = tmp_path / "eagle3-demo-Q8_0.gguf"
    return tap_head_file(file, n_embd=demo.n_embd, layers=(0, 1, demo.n_layer), tokens=None)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a llama-server that is first on PATH."""
    folder = tmp_path / "bin"
    head_server.install(folder, DRAFT)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.fixture
async def backend() -> AsyncIterator[SwitchingBackend]:
    backend = SwitchingBackend()
    yield backend
    await backend.close()


async def test_a_model_with_a_head_is_one_of_this_machine(
    backend: SwitchingBackend, programs: Path, head: Path
) -> None:
    await load(backend, DEMO, n_ctx=2048)
    worker = backend.pid
    assert worker is not None
    cpu = min(os.sched_getaffinity(0))
    spec = PlacementSpec(cores=str(cpu))
    answer = await collect(
        backend.load(DEMO, LoadOptions(n_ctx=2048, draft_path=str(head), speculation=DRAFTING), spec)
    )
    assert isinstance(answer.events[-1], ModelLoaded), answer.events[-1]
    model = answer.events[-1].model
    assert not psutil.pid_exists(worker)  # its memory is free

    assert (model.path, model.server, model.engine) == (str(DEMO), "", "llama-server")
    assert model.draft == "eagle3-demo-Q8_0" and model.n_ctx == 2048 and model.cpus == (cpu,)
    assert model.quantization == "Q8_0" and model.fingerprint
    assert any("EAGLE-3 head" in note for note in model.notes)
    how = head_server.started(programs)
    assert how["cpus"] == [cpu] and how["has_key"] and backend.pid == how["pid"]
    assert how["arguments"]["--spec-draft-model"] == str(head) and how["arguments"]["--threads"] == "1"

    got = await collect(
        backend.generate(chat("Tell me a story", max_tokens=101, ignore_eos=True, speculation=DRAFTING))
    )
    figures = got.timings.speculation
    assert figures is not None and figures.source == "server"
    assert figures.draft_n_accepted / figures.draft_n == pytest.approx(0.47, abs=0.05)
    assert got.timings.tokens_per_pass == pytest.approx(1.9, abs=0.15)

    assert backend.pid == how["pid"]
    got = await collect(backend.generate(chat("Hello")))  # drafting off
    assert got.text and got.timings.speculation is None
    assert not psutil.pid_exists(how["pid"]) and "--spec-type" not in head_server.started(programs)["arguments"]

    pid = backend.pid
    await load(backend, DEMO, n_ctx=2048)  # the worker again
    assert pid is not None and not psutil.pid_exists(pid)
    assert (await collect(backend.generate(chat("Hello")))).text


async def test_a_real_head_drafts_for_its_target(
    backend: SwitchingBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_server.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    target, head = tmp_path / "target.gguf", tmp_path / "eagle3-target.gguf"
    shape = msgspec.structs.replace(shape_of("tiny", layers=6), architecture="llama")
    write_pair(target, None, 1.0, target=shape)
    write_eagle3(head, target)
    model = await load(backend, target, n_ctx=512, draft_path=str(head), speculation=DRAFTING)
    assert model.draft == "eagle3-target" and model.engine == "llama-server"
    request = chat("Hello", ignore_eos=True, speculation=DRAFTING)
    got = await collect(backend.generate(request))
    figures = got.timings.speculation
    assert figures is not None and figures.draft_n > 0
    plain = msgspec.structs.replace(request, speculation=Speculation())
    assert (await collect(backend.generate(plain))).text == got.text  # whatever a head of random weights drafts


async def test_an_answer_is_stopped_and_a_killed_server_started_again(
    backend: SwitchingBackend, programs: Path, head: Path
) -> None:
    await load(backend, DEMO, n_ctx=2048, draft_path=str(head), speculation=DRAFTING)
    endless = chat("Tell me a story", max_tokens=0, ignore_eos=True, speculation=DRAFTING)
    stream = backend.generate(endless)
    await backend.cancel()  # before the first event
    assert (await collect(stream)).finished.stop_reason == "cancelled"
    events = []
    async for event in backend.generate(endless):
        events.append(event)
        if isinstance(event, TextDelta):
            await backend.cancel()
    assert events[-1].stop_reason == "cancelled"

    events = []
    async for event in backend.generate(endless):
        events.append(event)
        if isinstance(event, TextDelta) and sum(isinstance(one, TextDelta) for one in events) == 1:
            assert backend.pid is not None
            os.kill(backend.pid, signal.SIGKILL)
    assert events[-1].code == "worker_died" and "llama-server crashed" in events[-1].message
    assert backend.model is None and backend.pid is None

    again = await collect(backend.generate(chat("Hello")))
    assert again.of(ModelLoaded) and again.text
    pid = backend.pid
    await backend.close()
    assert pid is not None and not psutil.pid_exists(pid)


async def test_a_load_can_be_cancelled(backend: SwitchingBackend, programs: Path, head: Path) -> None:
    options = LoadOptions(n_ctx=2048, draft_path=str(head))
    stream = backend.load(DEMO, options)
    await backend.cancel()  # before the first event
    assert isinstance((await collect(stream)).events[-1], LoadCancelled)
    events = []
    async for event in backend.load(DEMO, options):
        events.append(event)
        await backend.cancel()
    assert isinstance(events[-1], LoadCancelled), events
    assert backend.model is None and backend.pid is None


async def test_a_server_that_does_not_start_is_reported(
    backend: SwitchingBackend, tmp_path: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_server.install(tmp_path / "bin", DRAFT, fails="error: invalid argument: --spec-type")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    options = LoadOptions(n_ctx=2048, draft_path=str(head))
    failed = (await collect(backend.load(DEMO, options))).failed
    assert failed.code == "worker_died" and "invalid argument: --spec-type" in failed.message
    log = Path(failed.hint.removeprefix("Log: "))
    assert "invalid argument: --spec-type" in log.read_text()

    monkeypatch.setattr("cpuchat.models.heads.ENGINE", "no-such-program")
    failed = (await collect(backend.load(DEMO, options))).failed
    assert failed.code == EngineMissing.code and "Install llama.cpp" in failed.hint


async def test_a_head_that_does_not_fit_is_refused(
    backend: SwitchingBackend, programs: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpuchat.hardware.memory.available_bytes", lambda root: 1_000_000)
    failed = (await collect(backend.load(DEMO, LoadOptions(draft_path=str(head))))).failed
    assert failed.code == "does_not_fit" and "draft" in failed.message

    wide = tap_head_file(tmp_path / "eagle3-wide-Q8_0.gguf", n_embd=96, tokens=None)
    failed = (await collect(backend.load(DEMO, LoadOptions(draft_path=str(wide))))).failed
    assert failed.code == "draft_mismatch" and "96 values" in failed.message


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_the_server_ends_with_the_app_however_that_ends(programs: Path, head: Path) -> None:
    """As when the app is killed, so that nobody closes the pipe but the system; or when the host is."""
    server = ServerOptions(
        program=str(programs / "llama-server"), model=str(DEMO), head=str(head), kind="eagle3", port=free_port(),
        drafting=ServerDraftOptions(3), n_ctx=512, cpus=(min(os.sched_getaffinity(0)),),
    )  # fmt: skip
    for end in (lambda host: host.stdin.close(), lambda host: host.kill()):
        host = subprocess.Popen(
            [sys.executable, "-m", MODULE, msgspec.json.encode(server).decode()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "LLAMA_API_KEY": "key"},
        )  # fmt: skip
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        assert psutil.pid_exists(pid)
        end(host)
        await asyncio.to_thread(host.wait)
        while is_running(pid):
            await asyncio.sleep(0.01)
        host.stdout.close()


def test_its_drafts_are_shown_when_they_were_asked_for() -> None:
    info = ModelInfo(
        path="/m.gguf", name="m", architecture="llama", quantization="Q8_0", n_params=1, size=1, n_ctx=512,
        n_ctx_train=512, n_vocab=300, n_layer=2, n_threads=1,
    )  # fmt: skip
    meter = SpeculationMeter()
    meter.model(msgspec.structs.replace(info, engine="llama-server"))
    assert not meter.drafting(None, False).wanted
    meter.asked = DRAFTING
    assert meter.drafting(None, False).wanted and not meter.drafting(None, False).adaptive
