"""Tests the order of measurements, and what is done about drift: no model, no clock."""

from __future__ import annotations

from collections.abc import Callable

from cpuchat.telemetry.rounds import GROUP, Protocol, schedule

CELLS = ["plain", "lookup", "draft", "auto", "suffix"]


class Machine:
    """Measures; the speed of each measurement is given by its number."""

    def __init__(self, speed: Callable[[int], float] = lambda number: 100.0) -> None:
        self.measured: list[str] = []
        self.kept: list[tuple[str, int, float, bool]] = []
        self._speed = speed

    async def measure(self, cell: str) -> float:
        self.measured.append(cell)
        return self._speed(len(self.measured) - 1)

    def keep(self, cell: str, number: int, sample: float, noisy: bool) -> None:
        self.kept.append((cell, number, sample, noisy))

    async def run(self, cells: list[str], rounds: int = 3, done: tuple[tuple[str, int], ...] = ()) -> None:
        await Protocol(rounds, self.measure, lambda sample: sample, self.keep).run(cells, done)

    @property
    def order(self) -> list[tuple[str, int]]:
        return [(cell, number) for cell, number, _, _ in self.kept]


def measurements(n_cells: int, rounds: int) -> int:
    """Return the measurements without repeated groups: warm-ups, the anchor before and after every four, and the
    rounds."""
    return n_cells + 1 + n_cells * rounds + -(-n_cells * rounds // GROUP)


def test_every_other_round_runs_backwards() -> None:
    assert schedule(["a", "b"], 3) == [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]


async def test_a_warm_up_is_dropped_and_the_anchor_comes_after_every_four() -> None:
    machine = Machine()
    await machine.run(CELLS)
    n = len(CELLS)
    assert machine.measured[:n] == CELLS and machine.measured[n] == "plain"
    rest = machine.measured[n + 1 :]
    assert rest[GROUP :: GROUP + 1] == ["plain"] * 3 and rest[-1] == "plain"
    assert machine.order == schedule(CELLS, 3)
    assert not any(noisy for *_, noisy in machine.kept)
    assert len(machine.measured) == measurements(n, 3)


async def test_a_group_is_repeated_when_the_anchor_drifted() -> None:
    first_check = len(CELLS) + 1 + GROUP  # the anchor after the first group
    machine = Machine(lambda number: 100.0 if number < first_check else 80.0)
    await machine.run(CELLS)
    assert machine.order == schedule(CELLS, 3)
    assert all(sample == 80.0 and not noisy for _, _, sample, noisy in machine.kept)
    assert len(machine.measured) == measurements(len(CELLS), 3) + GROUP + 1


async def test_what_goes_on_drifting_is_repeated_twice_and_called_noisy() -> None:
    machine = Machine(lambda number: 100.0 * 1.5**number)
    await machine.run(CELLS[:2])
    assert machine.order == schedule(CELLS[:2], 3)
    assert all(noisy for *_, noisy in machine.kept)
    groups = 2
    assert len(machine.measured) == 2 + 1 + 3 * (6 + groups)


async def test_a_drift_of_ten_percent_is_none() -> None:
    machine = Machine(lambda number: 109.0 if number % 2 else 100.0)
    await machine.run(CELLS)
    assert len(machine.measured) == measurements(len(CELLS), 3)


async def test_what_is_done_is_not_measured_again_not_even_to_warm_up() -> None:
    done = (("plain", 1), ("plain", 2), ("plain", 3), ("lookup", 1))
    machine = Machine()
    await machine.run(["plain", "lookup", "draft"], done=done)
    assert "plain" not in machine.measured
    assert machine.order == [one for one in schedule(["plain", "lookup", "draft"], 3) if one not in done]
    again = Machine()
    await again.run(["plain"], done=done)
    assert not again.measured


async def test_a_single_cell_needs_no_anchor() -> None:
    machine = Machine()
    await machine.run(["plain"], rounds=4)
    assert len(machine.measured) == 5
    assert machine.order == [("plain", n) for n in (1, 2, 3, 4)]
