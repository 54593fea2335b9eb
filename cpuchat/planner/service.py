"""Many users of a model on a few machines: how many machines, and what users get, simulated."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from cpuchat.costmodel.passes import pass_cost, prefill_cost
from cpuchat.errors import UsageError
from cpuchat.planner.fleet import Demand, Outcome, Server, capacity, exponential, simulate
from cpuchat.planner.plan import MOST_USERS, Plan, require_fit

PAUSE_S = 60.0
"""Seconds between an answer and the user's next message: reading 300 tokens at about 5 tok/s."""
_SIZES = (0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Numbers of machines to simulate, by that at which they saturate."""
_REQUESTS, _MOST_REQUESTS = 4_000, 20_000
_TURNS = 5  # requests for each chat that runs at once: the fleet is empty at first
_MOST_SIMULATED = 50
"""Machines beyond which one queue is hardly shorter: of more, so many are simulated with their share of the users."""
_MOST_MACHINES = 10_000


@dataclass(frozen=True, slots=True)
class Service:
    """`users` that send `rate` requests per second together; a machine saturates at `machine_rate`, with at most
    `chats` at once. `outcomes` by rising number of machines; `enough` is the first that gives 95 % of the answers the
    target tok/s without a queue, None when none of these does."""

    users: int
    rate: float
    machine_rate: float
    chats: int
    outcomes: tuple[Outcome, ...]
    enough: int | None

    @property
    def saturates_at(self) -> float:
        """Return the users at which one machine saturates."""
        return self.users * self.machine_rate / self.rate


def simulate_service(plan: Plan) -> Service:
    """Simulate the users of `plan.workload` with its expected figures; lengths are random with those means.

    Raises:
        UsageError: the model does not fit, one chat alone does not reach the target tok/s, or far too many machines
            would be needed.
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
    # A user waits for the answer, reads it, and asks again.
    cycle = PAUSE_S + server.prefill_s(workload.n_prompt) + workload.n_answer / workload.tok_s
    demand = Demand(workload.users / cycle, exponential(workload.n_prompt), exponential(workload.n_answer))
    limit = capacity(server, workload.n_prompt, workload.n_answer)
    least = demand.rate / limit
    if least > _MOST_MACHINES:
        raise UsageError(f"Needs more than {_MOST_MACHINES:,} machines.", "Use fewer --users.")
    counts = sorted({max(math.ceil(share * least), 1) for share in _SIZES})
    outcomes = tuple(_simulated(server, count, demand, count <= least) for count in counts)
    good = (one.machines for one in outcomes if not one.saturated and one.tok_s.p95 >= workload.tok_s)
    return Service(workload.users, demand.rate, limit, chats, outcomes, next(good, None))


def _simulated(server: Server, machines: int, demand: Demand, overloaded: bool) -> Outcome:
    """Simulate; a small overload makes the queue grow too slowly to be noticed, so it is told."""
    few = min(machines, _MOST_SIMULATED)
    requests = min(max(_REQUESTS, _TURNS * few * server.most), _MOST_REQUESTS)
    found = simulate(server, few, dataclasses.replace(demand, rate=demand.rate * few / machines), requests)
    return dataclasses.replace(
        found,
        machines=machines,
        total_tok_s=found.total_tok_s * machines / few,
        saturated=found.saturated or overloaded,
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
