"""Random chat histories whose answers are compared with those of an engine that reuses nothing. For `states.py`.

Every letter of the answers is one token, so the first letters that differ are the first tokens that do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import MeasureError, Row, Target, say, table
from product import GREEDY, ask, worker
from state_chats import LETTERS

from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import WorkerDied
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol.messages import (
    AnyEvent,
    ContextTrimmed,
    Failed,
    Generate,
    LoadOptions,
    Message,
    PrefillProgress,
    Speculation,
    TextDelta,
)
from tests.support.tiny_gguf import Architecture, write_tiny_gguf

ARCHITECTURES: tuple[Architecture, ...] = ("qwen35", "lfm2", "nemotron_h", "gemma3", "mamba")
OPTIONS = LoadOptions(n_ctx=2048, n_batch=128, n_ubatch=64, type_k="f32", type_v="f32", flash_attn="off")
"""Without flash attention and with F32, where the logits of a token hardly depend on the batches before it: by a few
10^-4 standard deviations, against 0.1 with flash attention."""
ONE_THREAD = PlacementSpec(threads=1)
DRAFTING = Speculation(drafters=("lookup",), depth=4)
MEMORY = 4 << 20
"""Bytes for states in memory: full after a few chats of these models."""
WINDOW, GAIN = 48, 3.0
STEPS, LONGEST, FULL = 10, 40, 1300
"""Steps of a history; tokens of an answer; letters from which on a chat is left for a new one."""
TIE = 1e-3
"""Difference of two logits, in standard deviations of the row, that rounding explains."""

Branch = tuple[Message, ...]
When = Callable[[AnyEvent, str], bool]


@dataclass
class Tally:
    """Answers of one architecture, compared."""

    histories: int = 0
    identical: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def answers(self) -> int:
        return self.identical + self.ties + len(self.wrong)


@dataclass
class _Talk:
    """A chat: the branch that is shown, and all that there were."""

    id: str
    path: Branch = ()
    branches: list[Branch] = field(default_factory=lambda: [()])


class _History:
    """One history: chats with `engine`, whose answers are compared with those of `reference`."""

    def __init__(self, engine: LocalBackend, reference: LocalBackend, file: Path, seed: str, tally: Tally) -> None:
        self._engine = engine
        self._reference = reference
        self._file = file
        self._seed = seed
        self._dice = random.Random(seed)
        self._tally = tally
        self._done: list[str] = []
        self._talks = [_Talk(f"{seed} 0")]
        self._talk = self._talks[0]

    async def run(self) -> None:
        often = (
            self._send, self._stop, self._stop_prefill, self._edit, self._regenerate, self._branch, self._change_chat
        )  # fmt: skip
        steps = (*often, *often, self._restart, self._kill, self._kill_answering)
        await self._send()
        for _ in range(STEPS):
            if sum(len(message.content) for message in self._talk.path) > FULL:
                self._new_chat()
            step = self._dice.choice(steps)
            self._done.append(step.__name__.strip("_"))
            await step()
        self._tally.histories += 1

    def _user(self) -> Message:
        length = self._dice.randint(1, 80)
        return Message(role="user", content="".join(self._dice.choice(LETTERS) for _ in range(length)))

    async def _send(self) -> None:
        await self._answer((*self._talk.path, self._user()))

    async def _stop(self) -> None:
        after = self._dice.randint(1, LONGEST - 10)
        cut = await self._answer(
            (*self._talk.path, self._user()), LONGEST, lambda _, text: len(text) >= after, self._engine.cancel
        )
        if cut and self._dice.random() < 0.5:  # a client that hung up has not received all of it
            message = Message(role="assistant", content=self._talk.path[-1].content[:after])
            self._keep((*self._talk.path[:-1], message))

    async def _stop_prefill(self) -> None:
        path, n = (*self._talk.path, self._user()), self._dice.randint(1, LONGEST)
        least = self._dice.randrange(4) * OPTIONS.n_ubatch

        def when(event: AnyEvent, _: str) -> bool:
            return isinstance(event, PrefillProgress) and event.processed - event.cache_n >= least

        await self._answer(path, n, when, self._engine.cancel)
        await self._answer(path, n)

    async def _edit(self) -> None:
        asked = [i for i, message in enumerate(self._talk.path) if message.role == "user"]
        if asked:
            at = self._dice.choice(asked)
            text = self._talk.path[at].content
            kept = text[: self._dice.randrange(len(text))]
            await self._answer((*self._talk.path[:at], Message(role="user", content=kept + self._user().content)))

    async def _regenerate(self) -> None:
        if self._talk.path:
            await self._answer(self._talk.path[:-1])

    async def _branch(self) -> None:
        self._talk.path = self._dice.choice(self._talk.branches)
        await self._dice.choice((self._send, self._regenerate))()

    def _new_chat(self) -> None:
        self._talk = _Talk(f"{self._seed} {len(self._talks)}")
        self._talks.append(self._talk)

    async def _change_chat(self) -> None:
        if len(self._talks) < 3:
            self._new_chat()
        else:
            self._talk = self._dice.choice(self._talks)
        await self._send()

    async def _restart(self) -> None:
        await self._engine.unload()
        await self._dice.choice((self._send, self._regenerate))()

    async def _kill(self) -> None:
        await self._kill_worker()
        await self._dice.choice((self._send, self._regenerate))()

    async def _kill_answering(self) -> None:
        after = self._dice.randint(0, LONGEST - 10)
        path = (*self._talk.path, self._user())
        await self._answer(path, LONGEST, lambda _, text: len(text) >= after, self._kill_worker)
        await self._answer(path)

    async def _kill_worker(self) -> None:
        if self._engine.pid is not None:
            os.kill(self._engine.pid, signal.SIGKILL)

    def _keep(self, path: Branch) -> None:
        self._talk.path = path
        self._talk.branches.append(path)

    async def _answer(
        self, path: Branch, n: int = 0, when: When | None = None, act: Callable[[], object] | None = None
    ) -> bool:
        """Have `path` answered and compare; `act` once `when` is true of an event and the text so far.

        Returns whether there is an answer, which is now the end of the chat.
        """
        n = n or self._dice.randint(1, LONGEST)
        speculation = DRAFTING if self._dice.random() < 0.25 else Speculation()
        request = Generate(
            messages=path,
            sampling=GREEDY,
            max_tokens=n,
            ignore_eos=True,
            chat_id=self._talk.id,
            frame_seconds=0.0,
            speculation=speculation,
        )
        text = ""
        async with contextlib.aclosing(self._engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, ContextTrimmed) or (
                    isinstance(event, Failed) and (act is None or event.code != WorkerDied.code)
                ):
                    raise MeasureError(f"{self._trail}: {event}")
                text += event.text if isinstance(event, TextDelta) else ""
                if act is not None and when is not None and when(event, text):
                    await act()
                    when = None
        if act is None and len(text) != n:
            raise MeasureError(f"{self._trail}: {len(text)} tokens, not {n}")
        await self._compare(path, text)
        if text:
            self._keep((*path, Message(role="assistant", content=text)))
        return bool(text)

    async def _compare(self, path: Branch, text: str) -> None:
        if not text:
            return
        # Of another owner every time: what was evaluated for one is not reused for another.
        owner = f"{self._seed} {self._tally.answers}"
        request = Generate(messages=path, sampling=GREEDY, max_tokens=len(text), ignore_eos=True, owner=owner)
        done = await ask(self._reference, request)
        if done.timings.cache_n:
            raise MeasureError(f"the reference reused {done.timings.cache_n} tokens")
        if done.text == text:
            self._tally.identical += 1
            return
        at = next(i for i, (a, b) in enumerate(zip(text, done.text, strict=True)) if a != b)
        with ThreadPoolExecutor(1) as thread:  # llama.cpp pins the thread that loads
            gap = thread.submit(_gap, self._file, path, text[:at], text[at], done.text[at]).result()
        if gap <= TIE:
            self._tally.ties += 1
        else:
            self._tally.wrong.append(f"{self._trail}: token {at} of {len(text)}, logits {gap:.3g} deviations apart")

    @property
    def _trail(self) -> str:
        return f"{self._seed}: {', '.join(self._done)}"


def _gap(file: Path, path: Branch, same: str, one: str, other: str) -> float:
    """Return how far the logits of two letters are apart after `same` of the answer, in deviations of all letters'."""
    model = Model.load(
        file, OPTIONS, place(read_topology(), ONE_THREAD).cpus, on_progress=lambda *_: None, abort=AbortFlag()
    )
    try:
        turns = "".join(f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in path)
        tokens = model.vocab.tokenize_prompt(f"{turns}<|im_start|>assistant\n{same}".encode())
        for at in range(0, len(tokens), OPTIONS.n_ubatch):
            batch = tokens[at : at + OPTIONS.n_ubatch]
            model.sequence.extend(batch, n_outputs=1)
        letters = np.array([model.vocab.tokenize(letter.encode(), add_special=False)[0] for letter in LETTERS])
        row = model.sequence.logits(len(batch) - 1)[letters].astype(float)
        return float(abs(row[LETTERS.index(one)] - row[LETTERS.index(other)]) / row.std())
    finally:
        model.free()


async def _run(arch: Architecture, count: int, folder: Path) -> Tally:
    """Run histories one after the other in one engine, which keeps what it has of earlier ones."""
    tally = Tally()
    file = write_tiny_gguf(folder / f"{arch}.gguf", arch=arch, n_layer=3, likely=LETTERS, window=WINDOW, gain=GAIN)
    async with (
        worker(file, OPTIONS, ONE_THREAD, state_dir=folder / "states", state_limit=MEMORY) as engine,
        worker(file, OPTIONS, ONE_THREAD) as reference,
    ):
        for number in range(count):
            await _History(engine, reference, file, f"{arch} {number}", tally).run()
            if (number + 1) % 10 == 0:
                say(f"  {arch}: {number + 1} of {count} histories, {tally.answers} answers")
    return tally


def histories(archs: Sequence[Architecture], count: int) -> list[Row]:
    """Return a row for each architecture, after a table of what was found."""
    rows, lines = [], []
    for arch in archs:
        with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder:
            tally = asyncio.run(_run(arch, count, Path(folder)))
        for wrong in tally.wrong:
            say(f"WRONG {wrong}")
        numbers = (tally.histories, tally.answers, tally.identical, tally.ties, len(tally.wrong))
        lines.append([arch, *map(str, numbers)])
        note = "{} histories, {} answers: {} identical, {} ties, {} wrong".format(*numbers)
        what = f"{arch}: answers that differ by more than rounding"
        rows.append(Row(what, "", [len(tally.wrong)], target=Target(0, False), note=note))
    print(f"\n{table(lines, ('architecture', 'histories', 'answers', 'identical', 'ties', 'wrong'))}", flush=True)
    return rows
