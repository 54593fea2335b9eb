"""What a chat is at: one activity at a time, and all changes from one to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum, auto

from cpuchat.base.errors import UsageError


class Activity(Enum):
    """What a chat is at. In AWAITING_APPROVAL, an answer waits for the user to approve a call of a tool; in
    AWAITING_ROOM, nothing runs until the user says what a full chat does about its last question."""

    NONE = auto()
    LOADING = auto()
    ANSWERING = auto()
    SUMMARIZING = auto()
    MEASURING = auto()
    AWAITING_APPROVAL = auto()
    AWAITING_ROOM = auto()

    @property
    def runs(self) -> bool:
        return self not in (Activity.NONE, Activity.AWAITING_ROOM)

    @property
    def answers(self) -> bool:
        return self in (Activity.ANSWERING, Activity.AWAITING_APPROVAL)


_BEGINS = Activity.LOADING, Activity.ANSWERING, Activity.SUMMARIZING, Activity.MEASURING
_NEXT = {
    Activity.NONE: (*_BEGINS, Activity.AWAITING_ROOM),
    Activity.AWAITING_ROOM: (*_BEGINS, Activity.NONE),
    Activity.LOADING: (Activity.NONE,),
    Activity.ANSWERING: (Activity.NONE, Activity.AWAITING_APPROVAL),
    Activity.AWAITING_APPROVAL: (Activity.NONE, Activity.ANSWERING),
    Activity.SUMMARIZING: (Activity.NONE, Activity.ANSWERING),
    Activity.MEASURING: (Activity.NONE,),
}


class ActivityOwner:
    """Owns the activity of a chat, and the only stream of its backend: part of an activity, or work for idle time.

    `is_stopping`: what runs is to end, also a stream of it that has not begun."""

    def __init__(self) -> None:
        self.now = Activity.NONE
        self.is_stopping = self.is_streaming = False

    def change(self, to: Activity) -> None:
        """Go on to another activity. Raises ValueError: it cannot follow the present one."""
        if to not in _NEXT[self.now]:
            raise ValueError(f"{to} cannot follow {self.now}")
        self.is_stopping = self.is_stopping and self.now.runs
        self.now = to

    @contextlib.contextmanager
    def streaming(self, activity: Activity = Activity.NONE) -> Iterator[None]:
        """Hold the backend; where nothing runs, `activity` does meanwhile. Raises UsageError: something holds it."""
        if self.is_streaming:
            what = "A model is still being loaded or measured, or an answer written."
            raise UsageError(what, "Stop it with Esc first.")
        if self.now is Activity.MEASURING or not self.now.runs:  # each of its streams is stopped by itself
            self.is_stopping = False
        is_own = activity is not Activity.NONE and not self.now.runs
        if is_own:
            self.change(activity)
        self.is_streaming = True
        try:
            yield
        finally:
            self.is_streaming = False
            if is_own:
                self.change(Activity.NONE)

    @contextlib.contextmanager
    def awaiting_approval(self) -> Iterator[None]:
        """Let an answer wait for its user meanwhile."""
        self.change(Activity.AWAITING_APPROVAL)
        try:
            yield
        finally:
            if self.now is Activity.AWAITING_APPROVAL:  # else the answer has ended
                self.change(Activity.ANSWERING)

    def refuse_while_answering(self) -> None:
        """Raise UsageError while the open chat is answered."""
        if self.now.answers:
            raise UsageError("An answer is still running.", "Stop it with Esc first.")
