"""Simulates users of a model on several machines that decode chats together: discrete events, no steps of a clock.

Each user reads an answer, sends the next message, and waits for its answer: a closed population, which slows down with
the machines. Requests wait in one queue and go to the machine with the fewest chats. A machine evaluates one prompt at
a time, in micro-batches, each followed by a decoding step of its other chats, as llama-server and vLLM do; all running
chats get a token per step. Between events rates are constant, so only messages and ends are computed. With one chat per
machine and random lengths this is M/M/k//N (Kleinrock, Queueing Systems I, 1975, 3.8), and saturated it writes
batch / step(batch) tok/s.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cpuchat.base.errors import UsageError
from cpuchat.costs.model import MICRO_BATCH, pass_cost, prefill_cost
from cpuchat.planner.plan import MOST_USERS, Plan, Workload, require_fit

Lengths = Callable[[random.Random], float]
_WARM_UP = 0.1  # of the requests, not counted: the queue fills
_DONE = 1e-6  # of a token


@dataclass(frozen=True, slots=True)
class Server:
    """Speed of a machine: `prefill_s(tokens)` seconds for a prompt, `step_s(chats)` seconds for one token of each of
    so many chats, of which at most `most` run at once."""

    prefill_s: Callable[[float], float]
    step_s: Callable[[int], float]
    most: int


@dataclass(frozen=True, slots=True)
class Demand:
    """Users, the mean seconds between an answer and the next message, and the lengths of both in tokens."""

    users: int
    pause_s: float
    prompt: Lengths
    answer: Lengths


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Values that 50 % and 95 % of the requests do not exceed, or reach at least, and the mean."""

    mean: float
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Service of `machines`. `ttft_s` from arrival to the first token; `tok_s` of an answer (p95: 95 % are at
    least so fast); `total_tok_s` of all machines; `busy` share of the time in which a machine has something to do;
    `mean_chats` on a machine. `saturated`: there are more users than so many machines serve at their pace.
    """

    machines: int
    ttft_s: Percentiles
    tok_s: Percentiles
    total_tok_s: float
    busy: float
    mean_chats: float
    saturated: bool


@dataclass(slots=True)
class _Request:
    arrived: float
    prompt: float
    answer: float
    first: float = 0.0
    ended: float = 0.0


@dataclass(slots=True)
class _Machine:
    """`running` chats as a heap, by the `steps` of the machine at which each ends; the first of `to_prefill` has
    `prefill_left` micro-batches to go. `version` marks outdated events."""

    server: Server
    running: list[tuple[float, float, _Request]] = field(default_factory=list)
    steps: float = 0.0
    to_prefill: deque[_Request] = field(default_factory=deque)
    prefill_left: float = 0.0
    since: float = 0.0
    version: int = 0
    busy: float = 0.0
    chat_seconds: float = 0.0
    written: float = 0.0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.to_prefill)

    def add(self, request: _Request) -> None:
        self.to_prefill.append(request)
        if len(self.to_prefill) == 1:
            self.prefill_left = _batches(request.prompt)

    def _iteration(self) -> float:
        """Return the seconds of a decoding step, with a micro-batch of a prompt before it."""
        step = self.server.step_s(len(self.running)) if self.running else 0.0
        if not self.to_prefill:
            return step
        prompt = self.to_prefill[0].prompt
        return step + self.server.prefill_s(prompt) / _batches(prompt)

    def next_event(self) -> float:
        """Return when a prompt or an answer ends, if nothing comes in between."""
        if not self.load:
            return math.inf
        return self.since + self._steps_left() * self._iteration()

    def _steps_left(self) -> float:
        """Return the steps until a prompt or an answer ends."""
        steps = self.running[0][0] - self.steps if self.running else math.inf
        return max(min(steps, self.prefill_left) if self.to_prefill else steps, 0.0)

    def advance(self, now: float, *, due: bool = False) -> list[_Request]:
        """Compute everything up to `now`; return the answers that ended.

        `due`: this is the time of `next_event`, whatever is lost to rounding.
        """
        passed, self.since = now - self.since, now
        if not self.load:
            return []
        self.busy += passed
        self.chat_seconds += passed * self.load
        iteration = self._iteration()
        steps = passed / iteration if iteration > 0 else self._steps_left()
        if due:
            steps = max(steps, self._steps_left())
        self.steps += steps
        self.written += steps * len(self.running)
        if self.to_prefill:
            self.prefill_left -= steps
            if self.prefill_left <= _DONE:
                self._begin_answer(now)
        ended: list[_Request] = []
        while self.running and self.running[0][0] <= self.steps + _DONE:
            end, _, one = heapq.heappop(self.running)
            self.written += end - self.steps
            one.ended = now
            ended.append(one)
        return ended

    def _begin_answer(self, now: float) -> None:
        request = self.to_prefill.popleft()
        request.first = now
        self.written += 1
        heapq.heappush(self.running, (self.steps + max(request.answer - 1, 0.0), request.arrived, request))
        if self.to_prefill:
            self.prefill_left = _batches(self.to_prefill[0].prompt)


def _batches(prompt: float) -> float:
    return max(math.ceil(prompt / MICRO_BATCH), 1)


def simulate(server: Server, machines: int, demand: Demand, n_requests: int = 5_000, seed: int = 1) -> Outcome:
    """Simulate `n_requests` on `machines` like `server`. The same arguments give the same figures."""
    chance = random.Random(seed)
    fleet = [_Machine(server) for _ in range(machines)]
    loads = [0] * machines
    waiting: deque[_Request] = deque()
    done: list[_Request] = []
    # (when, machine or -1 for a message, version)
    events = [(chance.expovariate(1 / demand.pause_s), -1, user) for user in range(demand.users)]
    heapq.heapify(events)
    now = 0.0
    while len(done) < n_requests:
        now, index, version = heapq.heappop(events)
        touched: set[int] = set()
        if index < 0:
            waiting.append(_Request(now, demand.prompt(chance), max(demand.answer(chance), _DONE)))
        elif version != fleet[index].version:
            continue
        else:
            ended = fleet[index].advance(now, due=True)
            done += ended
            for user in range(len(ended)):
                heapq.heappush(events, (now + chance.expovariate(1 / demand.pause_s), -1, user))
            loads[index] = fleet[index].load
            touched.add(index)
        while waiting:
            free = min(range(machines), key=loads.__getitem__)
            if loads[free] >= server.most:
                break
            if free not in touched:
                fleet[free].advance(now)
            fleet[free].add(waiting.popleft())
            loads[free] = fleet[free].load
            touched.add(free)
        for machine in touched:
            fleet[machine].version += 1
            heapq.heappush(events, (fleet[machine].next_event(), machine, fleet[machine].version))
    return _outcome(fleet, done, now)


def _outcome(fleet: list[_Machine], done: list[_Request], now: float) -> Outcome:
    counted = done[int(_WARM_UP * len(done)) :]
    ttft = [one.first - one.arrived for one in counted]
    rates = [(one.answer - 1) / (one.ended - one.first) for one in counted if one.answer > 1 and one.ended > one.first]
    return Outcome(
        machines=len(fleet),
        ttft_s=_percentiles(ttft, highest=True),
        tok_s=_percentiles(rates, highest=False),
        total_tok_s=sum(one.written for one in fleet) / now if now else 0.0,
        busy=sum(one.busy for one in fleet) / (len(fleet) * now) if now else 0.0,
        mean_chats=sum(one.chat_seconds for one in fleet) / (len(fleet) * now) if now else 0.0,
        saturated=False,
    )


def _percentiles(values: list[float], *, highest: bool) -> Percentiles:
    """Return the percentiles, counted from the other end unless `highest` values are the bad ones."""
    if not values:
        return Percentiles(math.nan, math.nan, math.nan)
    ordered = sorted(values, reverse=not highest)
    return Percentiles(sum(values) / len(values), *(ordered[round(at * (len(values) - 1))] for at in (0.5, 0.95)))


def exponential(mean: float) -> Lengths:
    """Return random lengths as of answers of chats: many short ones, few long ones."""
    return lambda chance: chance.expovariate(1 / mean)


def fixed(length: float) -> Lengths:
    """Return always the same length."""
    return lambda chance: length


def capacity(server: Server, prompt: float, answer: float) -> float:
    """Return the requests per second that one machine serves at most, with chats of these lengths."""
    n = server.most
    return 1 / (server.prefill_s(prompt) + max(answer - 1, 0.0) * server.step_s(n) / n)


PAUSE_S = 60.0
"""Seconds between an answer and the user's next message: reading 300 tokens at about 5 tok/s."""
_SIZES = (0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Numbers of machines to simulate, by that which answers as many requests as the target asks for."""
_REQUESTS, _MOST_REQUESTS = 4_000, 20_000
_TURNS = 5  # requests of each user: all read at first
_MOST_SIMULATED = 50
"""Machines beyond which one queue is hardly shorter: of more, so many are simulated with their share of the users."""
_MOST_MACHINES = 10_000


@dataclass(frozen=True, slots=True)
class Service:
    """`users`, of whom a machine saturates at `saturates_at`, when it answers `machine_rate` requests per second, with
    at most `chats` at once. `outcomes` by rising number of machines; `enough` is the first that gives 95 % of the
    answers the target tok/s without a queue, None when none of these does."""

    users: int
    saturates_at: float
    machine_rate: float
    chats: int
    outcomes: tuple[Outcome, ...]
    enough: int | None


def simulate_service(plan: Plan) -> Service:
    """Simulate the users of `plan.workload` with its expected figures; lengths are random with those means. Raises
    UsageError: the model does not fit, one chat alone does not reach the target tok/s, or far too many machines would
    be needed.
    """
    require_fit(plan)
    workload = plan.workload
    chats = min(int(plan.users.value) if plan.users is not None else 0, plan.users_by_memory, MOST_USERS)
    if chats < 1 or plan.tok_s is None:
        rate = plan.tok_s.value if plan.tok_s is not None else 0.0
        raise UsageError(
            f"{plan.model.name} reaches {rate:.2g} tok/s on {plan.machine.name}: no number of machines gives each user "
            f"{workload.tok_s:g} tok/s.",
            "Choose a smaller model or quantization, another machine, or a lower --tok-s.",
        )
    server = server_of(plan, chats)
    limit = capacity(server, workload.n_prompt, workload.n_answer)
    saturates_at = limit * PAUSE_S + chats  # those who read, and those whose answers run (Little's law)
    cycle = PAUSE_S + server.prefill_s(workload.n_prompt) + workload.n_answer / workload.tok_s
    least = workload.users / (limit * cycle)  # at the target
    if least > _MOST_MACHINES:
        raise UsageError(f"Needs more than {_MOST_MACHINES:,} machines.", "Use fewer --users.")
    counts = sorted({max(math.ceil(share * least), 1) for share in _SIZES})
    outcomes = tuple(_simulated(server, count, workload, count * saturates_at < workload.users) for count in counts)
    good = (one.machines for one in outcomes if not one.saturated and one.tok_s.p95 >= workload.tok_s)
    return Service(workload.users, saturates_at, limit, chats, outcomes, next(good, None))


def _simulated(server: Server, machines: int, workload: Workload, saturated: bool) -> Outcome:
    few = min(machines, _MOST_SIMULATED)
    users = max(round(workload.users * few / machines), 1)
    demand = Demand(users, PAUSE_S, exponential(workload.n_prompt), exponential(workload.n_answer))
    requests = min(max(_REQUESTS, _TURNS * users), _MOST_REQUESTS)
    found = simulate(server, few, demand, requests)
    return dataclasses.replace(
        found, machines=machines, total_tok_s=found.total_tok_s * machines / few, saturated=saturated
    )


def server_of(plan: Plan, chats: int) -> Server:
    """Return the plan's machine with its expected profile, for at most `chats` at once."""
    profile, work, past = plan.machine.profile(), plan.model.work, plan.workload.n_past

    @functools.lru_cache(maxsize=8192)
    def batch_s(tokens: int) -> float:
        return prefill_cost(profile, work, tokens).seconds

    @functools.cache
    def step_s(running: int) -> float:
        return pass_cost(profile, work, running, past, sequences=running).seconds

    # Prompts in steps of 16 tokens: that many different ones are computed once.
    return Server(lambda tokens: batch_s(max(16 * round(tokens / 16), 16)), step_s, chats)
