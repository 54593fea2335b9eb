"""The app on a scripted backend, with everything else real: the store, the library, the settings file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from textual.events import Paste
from textual.message import Message
from textual.notifications import Notify
from textual.pilot import Pilot
from textual.screen import Screen

from cpuchat.backend.base import Backend
from cpuchat.base import paths
from cpuchat.chats.records import Chat
from cpuchat.chats.store import ChatStore
from cpuchat.config import settings
from cpuchat.config.servers import Source
from cpuchat.models.library.library import Library
from cpuchat.present.chats import Offer, Welcome
from cpuchat.session.conversation import Conversation
from cpuchat.tui.app import ChatApp
from cpuchat.tui.chat.screen import ChatScreen
from cpuchat.tui.chat.status import StatusLine
from cpuchat.tui.downloading import Opener, open_downloads
from cpuchat.tui.markdown.transcript import Transcript
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from cpuchat.tui.widgets.prompt import PromptInput
from tests.support.idle import draw
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, Step, answer

Opened = TypeVar("Opened", bound=Screen[Any])
HANG_GUARD = 180.0
WIDE, SMALL = (120, 40), (80, 24)
WELCOME = Welcome(
    "8 cores · 51 GB/s · a 4B model: ≈15 tok/s",
    Offer("Open Qwen3 8B", "Q4_K_M 5.0 GB · ≈7.9 tok/s here · Ctrl+O: 2 more"),
)


class RunningApp:
    """A running app and short words for what tests do with it."""

    def __init__(self, app: ChatApp, pilot: Pilot[Any], backend: Any, seen: asyncio.Event, told: list[str]) -> None:
        self.app = app
        self.pilot = pilot
        self.backend = backend
        self.looked = False
        """Whether the test looked at the screen."""
        self._seen = seen
        self._told = told

    @property
    def chat(self) -> ChatScreen:
        return self.app.chat_screen

    @property
    def conversation(self) -> Conversation:
        return self.app.conversation

    @property
    def prompt(self) -> PromptInput:
        return self.chat.query_one(PromptInput)

    @property
    def status(self) -> str:
        return str(self.chat.query_one(StatusLine).render())

    @property
    def transcript(self) -> Transcript:
        return self.chat.query_one(Transcript)

    @property
    def notices(self) -> list[str]:
        """Return the toasts that are or were shown."""
        return self._told

    @property
    def screen_text(self) -> str:
        """Return the text of the screen, line by line."""
        self.looked = True
        width = self.app.size.width
        lines = self.app.screen._compositor.render_strips(self.app.size)
        return "\n".join(line.text.ljust(width) for line in lines)

    async def until(self, predicate: Callable[[], object]) -> None:
        """Wait until a condition holds; checks again whenever a message passes through the app."""
        async with asyncio.timeout(HANG_GUARD):
            while not predicate():
                assert self.app._exception is None, self.app._exception
                self._seen.clear()
                # Not everything that changes sends a message (a task that ends doesn't): look now and then as well.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._seen.wait(), 0.05)
                await asyncio.sleep(0.01)  # looking is not free, and more comes with that message
        if self.app.is_running and not self.app._exit:
            await self.pilot.pause()

    async def loaded(self, times: int) -> tuple[Any, Any]:
        """Wait until so many loads were asked for and nothing runs; return file and options of the last."""
        await self.until(lambda: len(self.backend.loads) == times and not self.chat.session.busy)
        return self.backend.loads[-1]  # type: ignore[no-any-return]

    async def ready(self) -> None:
        """Wait until the first model is loaded and nothing runs."""
        await self.until(lambda: self.backend.model is not None and not self.chat.session.busy)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    def press_last(self, key: str) -> None:
        """Press a key that ends the app, after which nothing can be waited for on its screen."""
        self.app.simulate_key(key)

    async def write(self, text: str) -> None:
        """Put text into the prompt as if typed."""
        self.prompt.focus()
        self.prompt.put(text)
        await self.pilot.pause()

    async def paste(self, text: str) -> None:
        """Paste into the prompt, and wait until it is there."""
        self.prompt.focus()
        before = self.prompt.text
        self.app.post_message(Paste(text))
        await self.until(lambda: self.prompt.text != before)

    async def send(self, text: str, wait: bool = True) -> None:
        """Write, press Enter, and wait for the end of the answer unless told not to."""
        await self.write(text)
        told = len(self.notices)
        await self.press("enter")
        if text.strip():
            await self.until(lambda: self._taken(text) or len(self.notices) > told)
        if wait:
            await self.until(lambda: not self.chat.session.busy)

    async def run(self, command: str) -> None:
        """Type a command, and press Enter."""
        await self.write(command)
        await self.press("enter")

    async def told(self, *words: str) -> None:
        """Wait until a toast has had each of these words."""
        await self.until(lambda: all(any(one in notice for notice in self.notices) for one in words))

    async def shows(self, *words: str) -> None:
        """Wait until the screen has these words."""
        await self.until(lambda: all(one in self.screen_text for one in words))

    async def opens(self, kind: type[Opened]) -> Opened:
        """Wait until a screen of that kind is on top, and return it."""
        await self.until(lambda: isinstance(self.app.screen, kind))
        screen = self.app.screen
        assert isinstance(screen, kind)
        return screen

    async def closes(self) -> None:
        """Wait until the chat is on top."""
        await self.until(lambda: self.app.screen is self.chat)

    async def idle(self, requests: int = 0) -> None:
        """Wait until nothing runs, and so many requests were made."""
        await self.until(lambda: len(self.backend.requests) >= requests and not self.chat.session.busy)

    async def confirm(self) -> None:
        """Answer the question that opens with yes."""
        await self.opens(ConfirmScreen)
        await self.press("y")

    def contents(self) -> list[str]:
        """Return the texts of the messages that are shown."""
        return [message.content for message in self.transcript.messages]

    async def select(self, index: int) -> None:
        """Put the marker on the message with this index."""
        self.transcript.focus()
        await self.until(lambda: self.transcript.has_focus)
        last = len(self.transcript.messages) - 1
        await self.press("j", *("j" * last), *("k" * (last - index)))

    async def count_up_to(self, gate: Gate) -> None:
        """Ask the loaded model to count, and wait until the answer has reached `gate`."""
        await self.ready()
        await self.send("Count", wait=False)
        await self.until(gate.reached.is_set)

    def _taken(self, text: str) -> bool:
        """Return whether the chat has accepted what was sent, or queues it."""
        return self.prompt.text != text or self.app.screen is not self.chat

    @property
    def open_chat(self) -> Chat:
        """Return the open chat, which is stored."""
        assert self.conversation.chat is not None
        return self.conversation.chat

    def stored(self) -> list[tuple[str, str]]:
        """Return (role, content) of the open chat's messages, from the store."""
        return [(m.role, m.content) for m in self.conversation.history.store.messages(self.open_chat.id)]


@contextlib.asynccontextmanager
async def running(
    backend: Backend | None = None,
    *,
    size: tuple[int, int] = WIDE,
    model: Source | None = Path(MODEL.path),
    folders: tuple[Path, ...] = (),
    prepare: Callable[[Conversation], None] | None = None,
    store: ChatStore | None = None,
    hub: Any = None,
    downloads: Opener = open_downloads,
    kind: type[ChatApp] = ChatApp,
    welcome: Welcome | Callable[[], Welcome] = WELCOME,
) -> AsyncIterator[RunningApp]:
    """Start the app, of that `kind`; `prepare` may fill the store before. `hub` and `downloads` take the place of the
    real ones. `welcome`: what an empty chat has read, or reads."""
    backend = backend or ScriptedBackend()
    conversation = Conversation(settings=settings.load(), backend=backend, store=store or ChatStore(paths.chats_db()))
    if prepare is not None:
        prepare(conversation)
    app = kind(conversation, Library(folders, cache=paths.cache_dir() / "no-hub"), model, downloads=downloads)
    app.animation_level = "none"  # pictures show where things come to rest
    app.services.describe_machine = lambda *_: welcome if isinstance(welcome, Welcome) else welcome()
    if hub is not None:
        app.services.hub = hub
    seen = asyncio.Event()
    told: list[str] = []

    def hook(message: Message) -> None:
        if isinstance(message, Notify):
            told.append(message.notification.message)
        seen.set()

    async with app.run_test(size=size, message_hook=hook, notifications=True) as pilot:
        ran = RunningApp(app, pilot, backend, seen, told)
        yield ran
        if not ran.looked:
            draw(app)


@contextlib.asynccontextmanager
async def loaded(backend: Backend | None = None, **options: Any) -> AsyncIterator[RunningApp]:
    """Start the app as `running` does, and wait until its model is loaded."""
    async with running(backend, **options) as app:
        await app.ready()
        yield app


@contextlib.asynccontextmanager
async def counting(text: str, *more: list[Step], **options: Any) -> AsyncIterator[tuple[RunningApp, Gate]]:
    """Start the app, and have its model count: its answer `text` waits before the last word for the gate."""
    gate = Gate()
    async with running(ScriptedBackend([answer(text, gate=gate), *more]), **options) as app:
        await app.count_up_to(gate)
        yield app, gate


def three_chats(conversation: Conversation) -> None:
    for title in ("Regex for dates", "TOML schema", "What is a [roofline]?"):
        chat = conversation.history.store.create_chat("m", title=title)
        conversation.history.store.add_message(chat.id, "user", f"About {title}")
