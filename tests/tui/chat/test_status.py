"""Tests the line at the top: cores, memory policy, context and drafting."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cpuchat.config.servers import ServerModel
from cpuchat.protocol.messages import LoadProgress, ModelLoaded, Reconnecting
from cpuchat.protocol.model_info import EngineInfo
from cpuchat.protocol.reasons import UNCALIBRATED, DraftsOff
from cpuchat.telemetry.meter import DraftingFigures
from cpuchat.tui.chat.status import StatusLine
from tests.support.chat_app import SMALL, running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend
from tests.support.snapshots import HostApp
from tests.support.stores import ollama

PINNED = msgspec.structs.replace(MODEL, cpus=tuple(range(8)))
INTERLEAVED = EngineInfo(version="x", memory_policy="interleave:0-1")
REJECTED = EngineInfo(version="x", memory_policy="", policy_refused="not here")
OFF, SLOW = DraftingFigures(), DraftsOff("slow verification")


async def test_the_line_says_where_it_computes_how_full_the_context_is_and_who_drafts() -> None:
    status = StatusLine()
    async with HostApp(status).run_test(size=(120, 3)) as pilot:
        status.show_model(MODEL)
        assert "8 threads" in str(status.render())  # without cores of their own
        status.show_model(PINNED)
        for engine, words in (
            (None, "8 cores · 0/8k ctx"),
            (EngineInfo(version="x", memory_policy="local"), "8 cores · 0/8k ctx"),
            (INTERLEAVED, "8 cores · interleave 0-1 · 0/8k ctx"),
            (REJECTED, "8 cores · memory policy rejected · 0/8k ctx"),
        ):
            status.show_figures(0, engine, OFF)
            assert str(status.render()).rstrip().endswith(words)
        for used, is_marked in ((MODEL.n_ctx * 8 // 10 - 10, False), (MODEL.n_ctx * 8 // 10 + 1, True)):
            status.show_figures(used, None, OFF)
            assert ("! " in str(status.render())) == is_marked

        status.show_figures(46, None, OFF)
        status.show_state("loading gemma-3 · preparing  12 %")  # nothing of the model before
        assert str(status.render()).strip() == "cpuchat  loading gemma-3 · preparing  12 %"
        status.show_state("")
        assert "46/8k ctx" in str(status.render())

        status.show_model(msgspec.structs.replace(MODEL, draft="Qwen2.5-0.5B-Instruct", draft_quantization="Q8_0"))
        for drafting, words in (
            (DraftingFigures(wanted=True), "draft 0.5B Q8_0 · adaptive depth"),
            (DraftingFigures(wanted=True, depth=0, off=UNCALIBRATED), "draft 0.5B Q8_0 "),
            (DraftingFigures(wanted=True, depth=3, off=SLOW), "draft 0.5B Q8_0 · drafts off"),
            (DraftingFigures(wanted=True, depth=3), "draft 0.5B Q8_0 · adaptive depth 3"),
        ):
            status.show_figures(0, None, drafting)
            assert words in str(status.render())

        await pilot.resize_terminal(50, 3)  # the context stays when there is no room for more
        status.show_model(PINNED)
        status.show_figures(0, INTERLEAVED, OFF)
        assert "interleave" not in str(status.render()) and "0/8k ctx" in str(status.render())


async def test_a_load_names_a_server_or_a_model_of_ollama_and_a_long_name_leaves_room_for_its_phase(
    tmp_path: Path, tiny_model: Path
) -> None:
    tried = Reconnecting(request_id=0, attempt=1, attempts=5)
    gate = Gate()
    steps = [LoadProgress(phase="connecting", done=0, total=1), tried, gate, ModelLoaded(model=MODEL)]
    server = ServerModel("http://10.0.0.9:8080", "some")
    async with running(ScriptedBackend(load_steps=steps), size=SMALL, model=server) as app:
        await app.until(gate.reached.is_set)
        await app.until(lambda: app.status.strip() == "cpuchat  connecting to 10.0.0.9:8080 · attempt 2 of 6")
        assert "Now · connecting" in app.screen_text
        gate.open()
        await app.ready()
    for name, shown in (
        ("tiny:latest", "loading tiny:latest · warming up  50 %"),
        (f"{'long' * 20}:latest", f"loading {('long' * 20)[:42]}… · warming up  50 %"),
    ):
        gate = Gate()
        steps = [LoadProgress(phase="warming", done=1, total=2), gate, ModelLoaded(model=MODEL)]
        blob = ollama(tmp_path / str(len(name)), name, tiny_model)
        async with running(ScriptedBackend(load_steps=steps), size=SMALL, model=blob) as app:
            await app.until(gate.reached.is_set)
            await app.until(lambda shown=shown: app.status.strip() == f"cpuchat  {shown}")
            gate.open()
            await app.ready()
