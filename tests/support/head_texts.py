"""A model that drafts with its head and the same model without, in two workers, through what happens in chats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.backend.local import LocalBackend
from cpuchat.protocol.messages import (
    Failed,
    Generate,
    GenerationFinished,
    LoadOptions,
    Message,
    Output,
    Sampling,
    Speculation,
    StateKey,
    TextDelta,
)
from tests.support.chatting import in_use
from tests.support.cores import ON_ONE_CPU
from tests.support.shapes import word

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0)
"""At random: the token that a synthetic model is surest of is one of many, and that its head says is among them."""
_GRAMMAR = "root ::= ( [ ] [a-m]+ )+"
_OFF = Speculation()
_HEAD, _BOTH = Speculation(drafters=("draft",), depth=4), Speculation(drafters=("draft", "suffix"), depth=4)
WEIGHT = 4.0
"""Of the layers of a synthetic model: with less, its next token follows from the last one alone."""
_N_CTX, _LONG = 1024, 300


@dataclass
class Texts:
    """What was compared: how many answers, how many of the first ones are not like another, those that differ, and
    drafted tokens that were accepted, by what the answer was."""

    answers: int = 0
    distinct: set[str] = field(default_factory=set)
    different: list[str] = field(default_factory=list)
    accepted: dict[str, int] = field(default_factory=dict)


class _Sides:
    """The workers: with the head, and without. Both keep their states."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._backends: list[LocalBackend] = []

    async def start(self) -> None:
        """Start both, again if they run."""
        await self.close()
        for name, head in (("head", str(self._model)), ("plain", "")):
            backend = LocalBackend(log_dir=self._folder, state_dir=self._folder / f"kv-{name}")
            self._backends.append(backend)
            async for event in backend.load(self._model, LoadOptions(n_ctx=_N_CTX, draft_path=head), ON_ONE_CPU):
                assert not isinstance(event, Failed), event

    async def close(self) -> None:
        while self._backends:
            await self._backends.pop().close()

    async def ask(self, request: Generate, drafts: Speculation, cancel_after: int = 0) -> list[tuple[str, int]]:
        """Return the text of each side, and how many drafted tokens were accepted; `cancel_after` so many events."""
        found: list[tuple[str, int]] = []
        for backend, speculation in zip(self._backends, (drafts, _OFF), strict=True):
            parts, accepted = list[str](), 0
            async for event in backend.generate(msgspec.structs.replace(request, speculation=speculation)):
                assert not isinstance(event, Failed), event
                if isinstance(event, TextDelta):
                    parts.append(event.text)
                    if cancel_after and len(parts) == cancel_after:
                        await backend.cancel()
                elif isinstance(event, GenerationFinished):
                    accepted = event.timings.draft_n_accepted
            found.append(("".join(parts), accepted))
        return found


async def compare_texts(
    model: Path, folder: Path, prompts: Iterable[int], sampling: Sampling, *, restart_every: int
) -> Texts:
    """Let both sides answer each prompt, be stopped in the middle of the next answer, answer an edited message, answer
    it once more with another seed, and under a grammar; and after a restart of both, which every so many prompts have,
    go on with the chat. A stopped answer is compared as far as both were written. In every other chat suffix decoding
    drafts, too, and nothing does for the edited message."""
    found = Texts()
    async with in_use(_Sides(model, folder)) as sides:
        await sides.start()
        for number in prompts:
            usual = _BOTH if number % 2 else _HEAD

            async def told(
                what: str, *turns: str, seed: int = 0, number: int = number, drafts: Speculation = usual, **more: Any
            ) -> str:
                messages = [Message(role="assistant" if i % 2 else "user", content=one) for i, one in enumerate(turns)]
                after = more.pop("cancel_after", 0)
                request = Generate(
                    messages=tuple(messages), sampling=msgspec.structs.replace(sampling, seed=number + seed),
                    state=StateKey(chat=f"chat-{number}"), output=Output(frame_seconds=0.0),
                    max_tokens=_LONG if after else 24, **more,
                )  # fmt: skip
                (text, accepted), (plain, _) = await sides.ask(request, drafts, after)
                shared = min(len(text), len(plain)) if after else max(len(text), len(plain))
                found.answers += 1
                found.accepted[what] = found.accepted.get(what, 0) + accepted
                if text[:shared] != plain[:shared]:
                    found.different.append(f"{what}, prompt {number}: {text!r} and {plain!r}")
                return plain[:shared]

            asked = "".join(word(1000 + (number * 7919 + i * 13) % 700) for i in range(12 + number % 40))
            answer = await told("answer", asked)
            found.distinct.add(answer)
            stopped = await told("stopped", asked, answer, "And more?", cancel_after=1 + number % 3)
            await told("after a stop", asked, answer, "And more?", stopped, "Go on.")
            edited = asked[: len(asked) // 2] + " edited"
            await told("edited", edited, answer, "And more?", drafts=_OFF if number % 2 else usual)
            again = await told("regenerated", edited, answer, "And more?", seed=10_000)
            await told("grammar", edited, answer, "And more?", grammar=_GRAMMAR)
            if number % restart_every == restart_every - 1:
                await sides.start()
                await told("restarted", edited, answer, "And more?", again, "And then?")
    return found
