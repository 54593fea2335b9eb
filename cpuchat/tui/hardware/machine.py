"""A screen that knows the machine: threads read it and post messages, handlers here keep what they found."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import TYPE_CHECKING, cast

from textual import on, work
from textual.message import Message

from cpuchat.hardware.machine_reader import MachineFacts, MachineReader
from cpuchat.present.machine import Now
from cpuchat.telemetry.machine import MachineSample
from cpuchat.tui.widgets.dismissable import Dismissable

if TYPE_CHECKING:
    from cpuchat.hardware.numa.residency import Residency
    from cpuchat.tui.app import ChatApp

SAMPLE_SECONDS = 1.0


class MachineScreen(Dismissable[None]):
    """`facts` None: still being read. `now` follows the worker and the counters; `look_again` after it has changed."""

    class Found(Message):
        """The machine was read."""

        def __init__(self, facts: MachineFacts) -> None:
            super().__init__()
            self.facts = facts

    class Placed(Message):
        """Where the worker's memory is."""

        def __init__(self, pid: int, placement: Residency | None) -> None:
            super().__init__()
            self.pid = pid
            self.placement = placement

    class Sampled(Message):
        """A look at the counters."""

        def __init__(self, sample: MachineSample) -> None:
            super().__init__()
            self.sample = sample

    def __init__(self, reader: MachineReader | None = None) -> None:
        super().__init__()
        self.reader = reader or MachineReader()
        self.facts: MachineFacts | None = None
        self.now = Now()
        self._gone = threading.Event()  # ends the look at the counters

    def on_mount(self) -> None:
        self.chat_app.chat_screen.release_counters()
        self._read()

    def on_unmount(self) -> None:
        self._gone.set()

    @property
    def chat_app(self) -> ChatApp:
        return cast("ChatApp", self.app)

    def facts_changed(self) -> None:
        """The machine was read, or the worker is another one."""

    def figures_changed(self) -> None:
        """The counters or the placement tell something else."""

    def look_again(self) -> None:
        """Ask the worker that runs now, and about it."""
        conversation = self.chat_app.conversation
        pid, model = conversation.backend.pid, conversation.model
        counting = conversation.settings.hardware.counters
        self.now = Now(model, conversation.backend.engine if pid or model else None, counting=counting)
        self._gone.set()
        if self.facts is None:
            return
        self._gone = threading.Event()
        if counting:
            self._watch(self.facts, pid, self._gone)
        if pid is not None and model is not None:
            self._place(pid, [Path(model.path)])
        self.facts_changed()

    @work(thread=True, exclusive=True, group="facts")
    def _read(self) -> None:
        self.post_message(self.Found(self.reader.facts()))

    @on(Found)
    def _found(self, event: Found) -> None:
        self.facts = event.facts
        self.look_again()

    @work(thread=True, exclusive=True, group="placement")
    def _place(self, pid: int, files: list[Path]) -> None:
        self.post_message(self.Placed(pid, self.reader.placement(pid, files)))

    @on(Placed)
    def _placed(self, event: Placed) -> None:
        if event.pid == self.chat_app.conversation.backend.pid:
            self.now = dataclasses.replace(self.now, placement=event.placement, placed=True)
            self.figures_changed()

    @work(thread=True, group="counters")
    def _watch(self, facts: MachineFacts, pid: int | None, gone: threading.Event) -> None:
        monitor = self.reader.monitor(facts.topology, pid)
        try:
            while not gone.is_set():
                self.post_message(self.Sampled(monitor.sample()))
                gone.wait(SAMPLE_SECONDS)
        finally:
            monitor.close()

    @on(Sampled)
    def _sampled(self, event: Sampled) -> None:
        if event.sample != self.now.sample:
            self.now = dataclasses.replace(self.now, sample=event.sample)
            self.figures_changed()
