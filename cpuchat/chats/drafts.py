"""Saves what is typed and not sent, while it is typed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from cpuchat.base.errors import ChatsError
from cpuchat.chats.records import storable

if TYPE_CHECKING:
    from cpuchat.chats.store import ChatStore

PAUSE_SECONDS = 0.25
"""Seconds from a change to its save, which has what was typed in between, too."""

Draft = tuple[str, dict[str, str]]
"""The unsent text of a chat, and the pasted texts in it by their marks."""


class DraftSaver:
    """Saves the drafts of this window, on threads of its own, so that neither a disk nor a stuck event loop matters;
    `store` None: nothing. Windows do not share them, but those of one that has ended belong to the next that asks."""

    def __init__(self, store: ChatStore | None) -> None:
        self._store = store
        self._unsaved: dict[str | None, Draft] = {}
        self._saved: dict[tuple[str | None, str], str] = {}
        self._ended: set[str] = set()  # windows whose drafts are this one's with the next save
        self._timer: threading.Timer | None = None
        self.problem: ChatsError | None = None
        """Why the last save failed."""
        self._lock, self._saving = threading.Lock(), threading.Lock()

    @cached_property
    def _window(self) -> str:
        import psutil  # 10 ms

        return f"{os.getpid()}:{psutil.Process().create_time()}"

    def put(self, chat_id: str | None, text: str, pasted: Mapping[str, str]) -> None:
        """Have the draft of a chat saved, None for a new one; an empty `text` deletes it."""
        with self._lock:
            self._unsaved[chat_id] = text, {mark: pasted[mark] for mark in pasted if mark in text}
            if self._timer is None and self._store is not None:
                self._timer = threading.Timer(PAUSE_SECONDS, self.save)
                self._timer.daemon = True
                self._timer.start()

    def save(self) -> None:
        """Save now, on this thread. What cannot be saved is tried again with the next change."""
        with self._saving:
            with self._lock:
                unsaved, self._unsaved, self._timer = self._unsaved, {}, None
            if self._store is None or not unsaved:
                return
            parts: dict[tuple[str | None, str], str] = {}
            for id, (text, pasted) in unsaved.items():
                parts |= {(id, name): one for name, one in ({"": storable(text)} | pasted).items() if one}
            before = {part: text for part, text in self._saved.items() if part[0] in unsaved}
            changed = [(*part, parts.get(part)) for part in before | parts if parts.get(part) != before.get(part)]
            if not changed and not self._ended:
                return
            try:
                self._store.save_drafts(self._window, changed, self._ended)
            except ChatsError as error:
                self.problem = error
                with self._lock:
                    self._unsaved = unsaved | self._unsaved
            else:
                self._saved = {part: self._saved[part] for part in self._saved.keys() - before.keys()} | parts
                self._ended, self.problem = set(), None

    def take(self) -> dict[str | None, Draft]:
        """Return the drafts of this process and of windows that have ended, by chat. Raises ChatsError."""
        rows = self._store.drafts() if self._store is not None else []
        rows = [row for row in rows if all(isinstance(value, str) for value in row[1:])]
        windows = {window for _, window, *_ in rows}
        self._ended = {window for window in windows if window == self._window or not _is_open(window)}
        drafts: dict[tuple[str | None, str], Draft] = {}
        for chat_id, window, name, text in sorted(rows, key=lambda row: row[2]):
            if window in self._ended:
                before, pasted = drafts.get((chat_id, window), ("", {}))
                is_pasted = name.startswith("[")
                drafts[chat_id, window] = (before, pasted | {name: text}) if is_pasted else (before + text, pasted)
        found: dict[str | None, Draft] = {}
        for (chat_id, _), (text, pasted) in drafts.items():
            before, more = found.get(chat_id, ("", {}))
            found[chat_id] = joined(before, text), pasted | more
        for chat_id, draft in found.items():
            self.put(chat_id, *draft)
        return found


def _is_open(window: str) -> bool:
    import psutil

    pid, _, started = window.partition(":")
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        process = psutil.Process(int(pid))
        # The clock by which a start is told may have been set since.
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - float(started)) < 5
    return False


def joined(*texts: str) -> str:
    """Return the texts that are not empty, each on a line of its own."""
    return "\n".join(filter(None, texts))
