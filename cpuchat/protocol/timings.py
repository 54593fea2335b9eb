"""Figures of one answer, as the worker measures them and the store keeps them.

Names are llama-server's (`prompt_n`, `cache_n`, `predicted_ms`, ...).
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Literal

import msgspec

from cpuchat.protocol.reasons import DraftsOff

MIN_TOKENS = 16
"""Minimum tokens of an answer for a comparison with plain decoding."""


class DrafterCount(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one drafter in an answer; a kept one may name a drafter that is no more."""

    name: str
    draft_n: int
    draft_n_accepted: int


class SpeculationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation in one answer so far.

    `draft_n` drafted tokens that were verified, `draft_n_accepted` of them accepted, in `passes` of the target (all
    between the first token and the last: verify passes, plain steps, and those that evaluate accepted tokens again
    where a recurrent state cannot roll back the rejected ones alone). `by_position`: (drafted, accepted) for the first,
    second, ... token of a draft. `drafter` proposed last, `depth` is the draft depth in use now (0 = plain decoding).
    `draft_passes` are evaluations of the draft model, each of which reads all its weights. `draft_ms` is time spent
    drafting that verification waited for.
    `plain_ms` is what one plain token costs here now (None: not known, or `disturbed`: other programs were using the
    cores for part of the answer, and plain decoding was timed without them). `off` is why speculation is off; None: it
    is on. `source`: "" when the engine of this machine counted, else who counted ("server"); the depth is not known
    then."""

    passes: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    by_position: tuple[tuple[int, int], ...] = ()
    by_drafter: tuple[DrafterCount, ...] = ()
    drafter: str = ""
    depth: int = 0
    draft_passes: int = 0
    draft_ms: float = 0.0
    plain_ms: float | None = None
    disturbed: bool = False
    off: DraftsOff | None = None
    source: str = ""

    def followed_by(self, later: SpeculationFigures, joints: int) -> SpeculationFigures:
        """Return the figures of an answer that `later` continues, with `joints` passes between the two."""
        by_name: dict[str, tuple[int, int]] = {}
        for one in (*self.by_drafter, *later.by_drafter):
            by_name[one.name] = _sum(by_name.get(one.name, (0, 0)), (one.draft_n, one.draft_n_accepted))
        names = (DrafterCount(name=name, draft_n=n, draft_n_accepted=k) for name, (n, k) in by_name.items())
        positions = zip_longest(self.by_position, later.by_position, fillvalue=(0, 0))
        return msgspec.structs.replace(
            later,
            passes=self.passes + joints + later.passes,
            **_added(self, later, "draft_n", "draft_n_accepted", "draft_passes", "draft_ms"),
            by_position=tuple(_sum(one, other) for one, other in positions),
            by_drafter=tuple(names),
            plain_ms=None if self.disturbed or later.disturbed else later.plain_ms or self.plain_ms,
            disturbed=self.disturbed or later.disturbed,
        )

    def tokens_per_pass(self, predicted_n: int) -> float | None:
        """Return tokens per evaluation of the target, of `predicted_n` in all; the prompt gives the first one. None
        when nothing was drafted."""
        return (predicted_n - 1) / self.passes if self.draft_n and self.passes else None

    def speed_up(self, tok_s: float | None, predicted_n: int) -> float | None:
        """Return `tok_s` ÷ plain decoding of this model here. None when one of them is not known, nothing was drafted,
        and for a few tokens only, over which the first pass weighs too much."""
        if tok_s is None or not self.plain_ms or not self.draft_n or predicted_n < MIN_TOKENS:
            return None
        return tok_s * self.plain_ms / 1e3


def _added(one: Any, other: Any, *names: str) -> dict[str, Any]:
    """Return the sums of these fields."""
    return {name: getattr(one, name) + getattr(other, name) for name in names}


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


MAX_CPU_WAIT = 0.05
"""Share of the time that compute threads may wait for a core: beside other load a measurement tells nothing of the
machine."""
_MIN_WAIT_MS = 20.0
"""Milliseconds that threads wait for a core on any machine: those of a system's own programs."""
_MIN_QUEUED_S = 0.1


def cores_share(wait: float | None, ran: float | None) -> float | None:
    """Return the share of the cores that an answer got which `ran` and waited so long; None where it had them alone."""
    if wait is None or wait <= MAX_CPU_WAIT:
        return None
    return 1 - wait if ran is None else ran


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt took from kept states of the model, and why it was not more.

    `source` is where the state was: "" in the context already, "memory" or "disk", from where restoring it took `ms`.
    `changed` is what differs first from the text that was evaluated before: "" nothing (the prompt goes on), "system"
    (the system prompt), "trimmed" (oldest messages were left out), "message" (the content of message number `message`,
    the first one after the system prompt is 1), "template" (the template renders that message otherwise, for instance
    without its reasoning). `again` tokens are as before, but no state was kept so near: they were re-evaluated. `note`
    says once what is not kept, and which setting helps."""

    source: Literal["", "memory", "disk"] = ""
    ms: float = 0.0
    changed: Literal["", "system", "trimmed", "message", "template"] = ""
    message: int = 0
    again: int = 0
    note: str = ""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one answer, measured in the worker. `speculation` None: nothing was to be drafted.

    `cache_n` prompt tokens reused from the KV cache, `prompt_n` prompt tokens evaluated in `prompt_ms`; `reuse` says
    more of that (None: not known); `predicted_n` tokens written, `predicted_ms` from the first to the last of them;
    `ttft_ms` from the arrival of the request to the first token's text. Decode tok/s is (predicted_n - 1) /
    predicted_ms (DESIGN: figures). `reasoning_n` of the tokens are reasoning, which took `reasoning_ms` until the text
    of the answer began. `cpu_wait` is the share of the decoding time that the compute threads waited for a core which
    something else had, `cpu_ran` that they ran (None: not known).

    Of a server: `approximate`: it did not report its tokens, `predicted_n` counts the parts that it sent.
    `reused_known` False: it does not report reused tokens either, they are in `prompt_n`; so there is no prefill
    rate. `queue_ms` of `ttft_ms` the request waited for others there."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    ttft_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    n_past: int = 0
    n_ctx: int = 0
    seed: int = 0
    overhead_us: float = 0.0
    cpu_wait: float | None = None
    cpu_ran: float | None = None
    speculation: SpeculationFigures | None = None
    approximate: bool = False
    reused_known: bool = True
    reasoning_n: int = 0
    reasoning_ms: float = 0.0
    reuse: Reuse | None = None
    queue_ms: float = 0.0

    def followed_by(self, later: Timings) -> Timings:
        """Return the figures of an answer that `later` continues after calls of tools.

        A token's time and a pass are added for the first token of `later`, so that the rates are those over both."""
        n, ms = self.predicted_n + later.predicted_n, self.predicted_ms + later.predicted_ms
        spans = max(self.predicted_n - 1, 0) + max(later.predicted_n - 1, 0)
        reuse = self.reuse
        if reuse is not None and later.reuse is not None and later.reuse.note:  # it is said once
            reuse = msgspec.structs.replace(reuse, note=later.reuse.note)
        speculation = None
        if self.speculation is not None and later.speculation is not None:
            is_joined = bool(self.predicted_n and later.predicted_n)
            speculation = self.speculation.followed_by(later.speculation, int(is_joined))
        return msgspec.structs.replace(
            later,
            cache_n=self.cache_n,
            ttft_ms=self.ttft_ms,
            queue_ms=self.queue_ms,
            **_added(
                self, later, "prompt_n", "prompt_ms", "draft_n", "draft_n_accepted", "reasoning_n", "reasoning_ms"
            ),
            predicted_n=n,
            predicted_ms=ms * (n - 1) / spans if spans else ms,
            speculation=speculation,
            approximate=self.approximate or later.approximate,
            reused_known=self.reused_known and later.reused_known,
            reuse=reuse,
        )

    def less(self, prefill_ms: float, decode_ms: float) -> Timings:
        """Return the figures without milliseconds in which nothing ran, before the first token and after it."""
        less = {"prompt_ms": prefill_ms, "ttft_ms": prefill_ms, "predicted_ms": decode_ms}
        return msgspec.structs.replace(self, **{name: max(getattr(self, name) - ms, 0.0) for name, ms in less.items()})

    @property
    def prompt_per_second(self) -> float | None:
        """Return prefill tok/s over the evaluated tokens; None when there were none or their number is not known."""
        known = self.reused_known and self.prompt_n and self.prompt_ms > 0
        return 1e3 * self.prompt_n / self.prompt_ms if known else None

    @property
    def queued_s(self) -> float | None:
        """Return the seconds in a server's queue; None where it was next to nothing."""
        return self.queue_ms / 1e3 if self.queue_ms >= 1e3 * _MIN_QUEUED_S else None

    @property
    def cores_share(self) -> float | None:
        """Return the share of the cores that the answer got, where it waited for them for over 5 % and 20 ms of its
        decoding; None elsewhere."""
        waited_ms = (self.cpu_wait or 0.0) * self.predicted_ms
        return cores_share(self.cpu_wait, self.cpu_ran) if waited_ms > _MIN_WAIT_MS else None

    @property
    def predicted_per_second(self) -> float | None:
        """Return decode tok/s from the first to the last token; None below two tokens."""
        if self.predicted_n < 2 or self.predicted_ms <= 0:
            return None
        return 1e3 * (self.predicted_n - 1) / self.predicted_ms

    def fields(self) -> dict[str, float | None]:
        """Return llama-server's `timings` by its names: milliseconds, tokens per second; None where there is nothing to
        divide, or a server does not report it. `predicted_ms` runs from the first to the last token, so its rates
        divide by `predicted_n - 1`."""
        spans, rate = self.predicted_n - 1, self.prompt_per_second
        fields: dict[str, float | None] = {
            "cache_n": self.cache_n if self.reused_known else None,
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms if self.prompt_ms or not self.prompt_n else None,
            "prompt_per_token_ms": 1e3 / rate if rate else None,
            "prompt_per_second": rate,
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": self.predicted_ms / spans if spans > 0 else None,
            "predicted_per_second": self.predicted_per_second,
        }
        if self.draft_n:
            fields |= {"draft_n": self.draft_n, "draft_n_accepted": self.draft_n_accepted}
        if self.queued_s is not None:
            fields["queue_ms"] = self.queue_ms
        return fields

    @property
    def tokens_per_pass(self) -> float | None:
        """Return the figure as `SpeculationFigures` does; None without speculation."""
        return self.speculation.tokens_per_pass(self.predicted_n) if self.speculation is not None else None

    @property
    def speed_up(self) -> float | None:
        """Return the figure as `SpeculationFigures` does, over the whole answer; None without speculation."""
        if self.speculation is None:
            return None
        return self.speculation.speed_up(self.predicted_per_second, self.predicted_n)
