"""Tests whose turn it is."""

from __future__ import annotations

import asyncio

from cpuchat.serving.fair_queue import FairQueue, QueueTurn


async def served(queue: FairQueue, order: list[str], client: str, n: int = 1) -> None:
    """Take `n` turns one after the other; the client has left between them."""
    for _ in range(n):
        async with queue.slot(QueueTurn(client)):
            order.append(client)
            await asyncio.sleep(0)


async def test_clients_that_come_back_pass_nobody_who_waits() -> None:
    """Also where one has had a turn since it came."""
    queue, order = FairQueue(), list[str]()
    again = [served(queue, order, client, 50) for client in ("b", "c")]
    await asyncio.gather(*again, served(queue, order, "a"), served(queue, order, "a"))
    assert [at for at, client in enumerate(order) if client == "a"] == [2, 5]


async def test_one_that_comes_waits_for_one_turn_of_another_with_many() -> None:
    queue, order = FairQueue(), list[str]()
    many = asyncio.gather(*(served(queue, order, "a") for _ in range(5)))
    while not order:
        await asyncio.sleep(0)
    await served(queue, order, "b")
    await many
    assert order == ["a", "b", "a", "a", "a", "a"]
