"""Users of a model on machines that decode chats together, by the closed formula of a queue with so many users.

Each user reads an answer for `PAUSE_S` on average, sends the next message, and waits for its answer, so that users slow
down with the machines: M/M/1//N (Kleinrock, Queueing Systems I, 1975, 3.8), with a rate that rises with the chats in
progress. A machine evaluates each prompt by itself and reads the weights once per step for all chats: while n are in
progress it completes n ÷ (n × prompt + answer × step(n)) of them per second. The users are divided evenly.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

import msgspec
import numpy as np

from cpuchat.base.errors import UsageError
from cpuchat.costs.model import MICRO_BATCH, pass_cost, prefill_cost
from cpuchat.planner.plan import MAX_USERS, CapacityPlan, require_fit

PAUSE_S = 60.0
"""Seconds between an answer and the user's next message: reading 300 tokens at about 5 tok/s."""
AT_ONCE = 0.95
"""Share of the messages that begin at once on enough machines."""
_SIZES = (0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0)
"""Numbers of machines to show, by that which is enough."""


class UserPace(NamedTuple):
    """Seconds that a machine takes for a prompt, in so many micro-batches, and, at `step_s[n - 1]`, for a token of each
    of n chats; at most `len(step_s)` chats are in progress. Answers have `n_answer` tokens."""

    prefill_s: float
    n_batches: int
    n_answer: int
    step_s: np.ndarray

    @property
    def token_s(self) -> np.ndarray:
        """Return the seconds between two tokens of a chat, by the chats in progress: prompts of the others come
        between."""
        return self.step_s + np.arange(len(self.step_s)) * self.prefill_s / self.n_answer

    @property
    def prompt_s(self) -> np.ndarray:
        """Return the seconds from a place to the first token, by the chats in progress: a prompt, each micro-batch with
        a step of the others, behind the prompts that came before (mean value analysis: Reiser and Lavenberg, 1980)."""
        found, before = [], 0.0
        for n, step_s in enumerate(self.step_s, 1):
            found.append((self.prefill_s + self.n_batches * step_s) * (1 + before))
            before = n * found[-1] / (found[-1] + self.n_answer * step_s)
        return np.array(found)

    @property
    def rates(self) -> np.ndarray:
        """Return the answers per second, by the chats in progress."""
        n = np.arange(1, len(self.step_s) + 1)
        return n / (n * self.prefill_s + self.n_answer * self.step_s)


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """What users find on `machines`: the mean seconds to the first token, with the wait for a free place, and tok/s
    from there on. `at_once`: share of the messages that find a free place. `busy`: share of the time in which a machine
    has something to do. `chats` in progress on it. `total_tok_s` of all machines.
    """

    machines: int
    busy: float
    chats: float
    at_once: float
    ttft_s: float
    tok_s: float
    total_tok_s: float


class UserPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`users` of a plan. A machine with `chats` at once gives each the target tok/s, answers `messages_per_s`, and
    saturates at `saturates_at` users. On `enough` machines, `AT_ONCE` of the messages begin at once; `numbers` has
    these and others, by rising number of machines."""

    users: int
    chats: int
    messages_per_s: float
    saturates_at: float
    enough: int
    numbers: tuple[Occupancy, ...]


def plan_users(plan: CapacityPlan, users: int) -> UserPlan:
    """Return how many machines of the plan so many users need. Raises UsageError: the model does not fit, or one chat
    alone does not reach the target tok/s."""
    require_fit(plan)
    pace = pace_of(plan)
    chats = len(pace.step_s)
    if not chats:
        rate = plan.tok_s.value if plan.tok_s is not None else 0.0
        raise UsageError(
            f"{plan.model.name} reaches {rate:.2g} tok/s on {plan.machine.name}: no number of machines gives each user "
            f"{plan.workload.tok_s:g} tok/s.",
            "Choose a smaller model or quantization, another machine, or a lower --tok-s.",
        )
    numbers = range(1, users + 1)
    enough = numbers[bisect_left(numbers, AT_ONCE, key=lambda machines: occupancy(pace, users, machines).at_once)]
    most = float(pace.rates[-1])
    return UserPlan(
        users=users,
        chats=chats,
        messages_per_s=most,
        saturates_at=most * PAUSE_S + chats,  # who read, and whose answers are in progress
        enough=enough,
        numbers=tuple(
            occupancy(pace, users, machines) for machines in sorted({math.ceil(size * enough) for size in _SIZES})
        ),
    )


def pace_of(plan: CapacityPlan) -> UserPace:
    """Return the pace of a plan's machine, as expected, with as many chats at once as reach the target."""
    profile, work, load = plan.machine.profile(), plan.model.work, plan.workload
    most = min(int(plan.users.value) if plan.users is not None else 0, plan.users_by_memory, MAX_USERS)
    pace = UserPace(
        prefill_s=prefill_cost(profile, work, load.n_prompt).seconds,
        n_batches=math.ceil(load.n_prompt / MICRO_BATCH),
        n_answer=load.n_answer,
        step_s=np.array([pass_cost(profile, work, n, load.n_past, sequences=n).seconds for n in range(1, most + 1)]),
    )
    fast = np.flatnonzero(pace.token_s <= 1 / load.tok_s)
    return pace._replace(step_s=pace.step_s[: fast[-1] + 1 if len(fast) else 0])


def occupancy(pace: UserPace, users: int, machines: int, pause_s: float = PAUSE_S) -> Occupancy:
    """Return what `users` of `machines` find; of uneven numbers, on the machine with the most users."""
    each, most = math.ceil(users / machines), len(pace.step_s)
    present = np.arange(each + 1)  # chats in progress, or waiting for a place
    running = np.minimum(present, most)
    rates = np.append(0.0, pace.rates)[running]
    # Births and deaths: n chats are as likely as n - 1, times arrivals by completions.
    logs = np.append(0.0, np.cumsum(np.log((each - present[:-1]) / (pause_s * rates[1:]))))
    chances = np.exp(logs - logs.max())
    chances /= chances.sum()
    completed = float(chances @ rates)
    # A message finds the others as they would be without its user.
    found = chances * (each - present)
    found /= found.sum()
    beside = np.minimum(present, most - 1)  # the others in progress
    waiting_s = float(chances @ (present - running)) / completed  # Little's law
    return Occupancy(
        machines=machines,
        busy=1 - float(chances[0]),
        chats=float(chances @ running),
        at_once=float(found[:most].sum()),
        ttft_s=waiting_s + float(found @ pace.prompt_s[beside]),
        tok_s=1 / float(found @ pace.token_s[beside]),
        total_tok_s=completed * pace.n_answer * users / each,
    )
