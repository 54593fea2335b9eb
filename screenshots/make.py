"""Makes the pictures of this folder: the real app with the real worker, at 80×24 and 120×40.

    .venv/bin/python screenshots/make.py [NAME ...]

The machine must be idle, and stay so: its read bandwidth and passes are measured first, and all pictures of a run show
these, so make them all in one run. The code that models write in them has been run (`benchmarks/checked.py`). `stage`
is the moving picture of the README, from the recording in the package. Needs rsvg-convert, Pillow and the Fira Code
font (Debian: librsvg2-bin, python3-pil, fonts-firacode).
"""

from __future__ import annotations

import asyncio
import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
os.environ["COLORTERM"] = "truecolor"  # whatever the terminal of the pictures has
sys.path.insert(0, str(HERE.parent))  # the hub and the downloads of the pictures are in tests/support
sys.path.append(str(HERE.parent / "benchmarks"))  # and the prompts there

from checked import INTERVALS, SQL, CheckedPrompt  # noqa: E402

DEMO = HERE.parent / "cpuchat/models/demo"
REAL = HERE.parent / "benchmarks/work/models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
LARGER = REAL.with_name("qwen2.5-coder-1.5b-instruct-q8_0-from-q4.gguf")
"""What `chat`, `compare` and `hardware` show, where `benchmarks/coder_pair.py` has made them; else the demo models, in
the cache, where memory limits nothing."""
SIZES = ((80, 24), (120, 40))
CELL = 12.2  # width of one character cell in Textual's SVG
PLACED = re.compile("[\u2248\u2500-\u25ff\u2691\u2800-\u28ff]")


def for_rsvg(svg: str) -> str:
    """Keep leading spaces, and put box drawing and braille cell by cell: fonts give them other widths."""

    def each(match: re.Match[str]) -> str:
        attributes, text = match.group(1), html.unescape(match.group(2))
        if not PLACED.search(text):
            return f'<text xml:space="preserve"{attributes}>{match.group(2)}</text>'
        x = float(re.search(r'x="([\d.]+)"', attributes).group(1))  # type: ignore[union-attr]
        rest = re.sub(r'\s(x|textLength)="[^"]*"', "", attributes)
        return "".join(
            f'<text xml:space="preserve"{rest} x="{x + index * CELL:.1f}" textLength="{CELL}"'
            f' lengthAdjust="spacingAndGlyphs">{html.escape(character)}</text>'
            for index, character in enumerate(text)
            if character not in "\xa0 \u2800"
        )

    return re.sub(r"<text((?:\s[^>]*)?)>([^<]*)</text>", each, svg)


async def until(pilot: Any, condition: Callable[[], object], seconds: float = 240) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await pilot.pause(0.2)  # a process that looks more often disturbs what is measured


async def ask(pilot: Any, prompt: CheckedPrompt) -> None:
    """Ask the real model, and check its answer; ask the demo model what it knows."""
    conversation = pilot.app.conversation
    await until(pilot, lambda: conversation.model is not None and not conversation.activity.is_streaming)
    before = len(conversation.messages)
    pilot.app.screen.query_one("Composer").submit(prompt.text if REAL.is_file() else "What can you do?")
    await until(pilot, lambda: len(conversation.messages) == before + 2 and not conversation.activity.is_streaming)
    if REAL.is_file():
        prompt.check(conversation.messages[-1].content)
    await pilot.pause(0.6)


async def chat(pilot: Any) -> None:
    await ask(pilot, SQL)
    await ask(pilot, INTERVALS)


async def compare(pilot: Any) -> None:
    conversation = pilot.app.conversation
    await until(pilot, lambda: conversation.model is not None and not conversation.activity.is_streaming)
    wanted = 5  # answers of 0.03 s: their medians tell more than one of them
    if LARGER.is_file():
        from cpuchat.compare.runner import Side

        wanted, conversation.settings.chat.max_tokens = 1, 120
        sides = Side.of(LARGER), Side.of(REAL)
        pilot.app.chat_screen.commands.compare_sides(sides, INTERVALS.text)
    else:
        await pilot.press("ctrl+l")
    await until(pilot, lambda: pilot.app.screen.has_class("-measured") and not pilot.app.screen.busy)
    turn = pilot.app.screen.comparison.turns[-1]

    def is_idle() -> bool:
        return not any(worker.group == "round" and worker.is_running for worker in pilot.app.workers)

    while len(turn.rounds) < 3 * wanted and len([one for one in turn.rounds if not one.disturbed]) < wanted:
        n = len(turn.rounds)
        await until(pilot, is_idle)
        await pilot.press("ctrl+r")
        await until(pilot, lambda n=n: len(turn.rounds) > n and is_idle())
    stage = pilot.app.screen.query_one("#stage")
    await until(pilot, lambda: turn.rounds[-1].agreement is not None or turn.rounds[-1].agreement_note)
    await until(pilot, lambda: stage.at_ms == math.inf)
    await pilot.pause(0.6)


async def models(pilot: Any) -> None:
    await until(pilot, lambda: pilot.app.conversation.model is not None)
    await pilot.press("ctrl+o")
    await pilot.pause(2.5)


async def repository(pilot: Any) -> None:
    from cpuchat.tui.models.repository import RepositoryScreen
    from tests.support.downloads import REPO

    await until(pilot, lambda: pilot.app.conversation.model is not None)
    pilot.app.push_screen(RepositoryScreen(pilot.app.services, REPO))
    await pilot.pause(2.5)


async def hardware(pilot: Any) -> None:
    from cpuchat.tui.hardware.screen import HardwareScreen

    await ask(pilot, INTERVALS)
    await pilot.press("f12")
    await until(pilot, lambda: isinstance(pilot.app.screen, HardwareScreen) and pilot.app.screen.now.placed)
    await pilot.pause(1.5)


async def settings(pilot: Any) -> None:
    await until(pilot, lambda: pilot.app.conversation.model is not None)
    await pilot.press("f2")
    await pilot.pause(0.5)


async def help_screen(pilot: Any) -> None:
    await until(pilot, lambda: pilot.app.conversation.model is not None)
    await pilot.press("f1")
    await pilot.pause(0.5)


SCENES: dict[str, Callable[[Any], Awaitable[None]]] = {
    "compare": compare,
    "chat": chat,
    "models": models,
    "repository": repository,
    "hardware": hardware,
    "settings": settings,
    "help": help_screen,
}


def measured() -> bytes:
    """Return the record of what is measured of the machine, and of an answer that may raise the peak."""
    from cpuchat.base import paths

    cpuchat = [str(Path(sys.executable).with_name("cpuchat"))]
    with tempfile.TemporaryDirectory() as folder:
        at_home(Path(folder))
        probed = json.loads(subprocess.run([*cpuchat, "probe", "--json"], check=True, capture_output=True).stdout)
        if max(probed["all_cores"]["shares"]) < 0.9:
            sys.exit("Other programs are using the cores. Make the pictures on an idle machine.")
        if REAL.is_file():
            subprocess.run([*cpuchat, "ask", "--model", str(REAL), "--drafters", "off", INTERVALS.text], check=True)
        return paths.measured_file().read_bytes()


def peak() -> float:
    """The known read bandwidth of all cores in the home of a picture, in GB/s."""
    from cpuchat.hardware.topology import read_topology
    from cpuchat.measure.peak import known_of

    found = known_of(read_topology()).all_cores
    return found.bytes_per_s / 1e9 if found is not None else 0.0


def at_home(home: Path, record: bytes = b"") -> None:
    """A home with the program and a `record` of measurements, so that no path of this machine is in a picture."""
    from cpuchat.base import paths

    demo = home / "cpuchat/cpuchat/models/demo"
    shutil.copytree(DEMO, demo)
    paths.demo_dir = lambda: demo
    os.environ |= {"HOME": str(home), "HF_HOME": str(home / ".cache/huggingface")}
    for kind, folder in (("CONFIG", ".config"), ("DATA", ".local/share"), ("CACHE", ".cache")):
        os.environ[f"CPUCHAT_{kind}_DIR"] = str(home / folder / "cpuchat")
    paths.cache_dir().mkdir(parents=True)
    paths.measured_file().write_bytes(record)


def just_the_app(name: str, conversation: Any, library: Any) -> Any:
    from cpuchat.tui.app import ChatApp

    shows_real = name in ("chat", "hardware") and REAL.is_file()
    return ChatApp(conversation, library, REAL if shows_real else library.resolve("demo"))


def stand_in(_: str, conversation: Any, library: Any) -> Any:
    """An app that knows the sizes and headers of a real repository: nothing is downloaded to make a picture."""
    from cpuchat.tui.app import ChatApp
    from tests.support.downloads import download, left_by_the_last_run, model
    from tests.support.shown_hub import ShownHub

    offered = (
        model("Q4_K_M", 4_683_073_536),
        model("Q6_K", 6_254_198_784),
        model("Q8_0", 8_098_524_160),
        model("F16", 15_237_852_160, parts=2),
    )
    paused = left_by_the_last_run(download(offered[1], 0.2, state="paused"))
    app = ChatApp(conversation, library, library.resolve("demo"), downloads=paused.opener)
    app.services.hub = ShownHub(offered)  # type: ignore[assignment]
    return app


async def shoot(name: str, size: tuple[int, int]) -> Path:
    from cpuchat.backend.local import LocalBackend
    from cpuchat.base import paths
    from cpuchat.chats.store import ChatStore
    from cpuchat.config.settings import Settings
    from cpuchat.hardware.topology import read_topology
    from cpuchat.models.library.library import Library
    from cpuchat.session.conversation import Conversation

    settings_ = Settings()
    settings_.sampling.temperature = 0.0
    settings_.speculation.drafters = "off" if name == "compare" else "suffix"  # no draft model: memory is the limit
    settings_.hardware.probe = False  # all pictures show one measurement
    library = Library([])
    conversation = Conversation(settings=settings_, backend=LocalBackend(), store=ChatStore(paths.chats_db()))
    app = (stand_in if name == "repository" else just_the_app)(name, conversation, library)
    async with app.run_test(size=size) as pilot:
        await SCENES[name](pilot)
        on = read_topology().cpu_name
        svg = for_rsvg(app.export_screenshot(title=f"cpuchat · {size[0]}×{size[1]} · {on}, {os.cpu_count()} CPUs"))
        await pilot.press("ctrl+q")
    target = HERE / f"{name}-{size[0]}x{size[1]}.png"
    subprocess.run(["rsvg-convert", "-z", "1.2", "-o", str(target)], input=svg.encode(), check=True)
    return target


_FRAMES, _FRAME_MS, _LAST_MS = 48, 130, 4000  # pictures of the replay, and how long each is shown
_STAGE_SIZE = (104, 30)


async def stage() -> Path:
    """Return the recorded race of two quantizations as a moving picture, at the speed at which it was written."""
    from PIL import Image

    from cpuchat.backend.local import LocalBackend
    from cpuchat.base import paths
    from cpuchat.chats.store import ChatStore
    from cpuchat.config.settings import Settings
    from cpuchat.models.library.library import Library
    from cpuchat.session.conversation import Conversation
    from cpuchat.tui.compare.replay import ReplayScreen

    conversation = Conversation(settings=Settings(), backend=LocalBackend(), store=ChatStore(paths.chats_db()))
    app = just_the_app("stage", conversation, Library([]))
    target = HERE / "stage.gif"
    with tempfile.TemporaryDirectory() as folder:
        pictures: list[Path] = []
        async with app.run_test(size=_STAGE_SIZE) as pilot:
            await app.push_screen(screen := ReplayScreen("quantizations"))
            await until(pilot, lambda: screen.over)
            screen.begin()
            for number in range(_FRAMES + 1):
                screen.show_at(screen.recording.end_ms * number / _FRAMES if number < _FRAMES else float("inf"))
                await pilot.pause(0.2)
                file = Path(folder) / f"{number:03}.png"
                svg = for_rsvg(app.export_screenshot(title="cpuchat"))
                subprocess.run(["rsvg-convert", "-w", "1000", "-o", str(file)], input=svg.encode(), check=True)
                pictures.append(file)
            await pilot.press("ctrl+q")
        last = Image.open(pictures[-1]).convert("RGB").quantize(64)  # its colors are those of all
        images = [Image.open(file).convert("RGB").quantize(palette=last, dither=Image.Dither.NONE) for file in pictures]
        durations = [_FRAME_MS] * _FRAMES + [_LAST_MS]
        images[0].save(target, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True)
    return target


def main() -> None:
    chosen, record = sys.argv[1:] or (*SCENES, "stage"), b""
    if chosen != ["stage"]:
        record = measured()
    peaks: set[float] = set()
    for name in chosen:
        for size in SIZES if name != "stage" else (_STAGE_SIZE,):
            with tempfile.TemporaryDirectory() as folder:
                at_home(Path(folder), record)
                made = asyncio.run(stage() if name == "stage" else shoot(name, size))
                peaks.add(round(peak(), 1))
                print(f"{made.name}: {peak():.1f} GB/s")
    if len(peaks) > 1:
        print("An answer has raised the read bandwidth: the pictures do not agree. Make all of them again.")


if __name__ == "__main__":
    main()
