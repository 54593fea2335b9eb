"""Figures that the plan screen asks for."""

from __future__ import annotations

from typing import NamedTuple

from cpuchat.errors import UsageError


class Question(NamedTuple):
    """A figure that the user can change: its title and bounds."""

    title: str
    least: float
    most: float
    whole: bool = True

    def parse(self, text: str) -> float:
        """Return the number. Raises UsageError."""
        try:
            value = float(text.replace(",", "").replace("_", "").replace(" ", ""))
        except ValueError:
            raise UsageError(f"{text} is not a number.") from None
        if not self.least <= value <= self.most or (self.whole and value % 1):
            what = "a whole number" if self.whole else "a number"
            raise UsageError(f"Give {what} from {self.least:g} to {self.most:,.0f}.")
        return int(value) if self.whole else value


WORKLOAD = {
    "n_ctx": Question("Context per chat (tokens)", 256, 10_000_000),
    "n_prompt": Question("Prompt length (tokens)", 1, 9_000_000),
    "n_answer": Question("Answer length (tokens)", 1, 9_000_000),
    "users": Question("Concurrent users", 1, 1_000_000),
    "tok_s": Question("Target tok/s per user", 0.1, 1_000_000, whole=False),
}
NETWORK = {
    "machines": Question("Machines of this kind, by RPC (1: no network)", 1, 64),
    "gbit": Question("Network between them (Gbit/s)", 0.1, 10_000, whole=False),
}
COSTS = {
    "price_usd": Question("price (USD)", 1, 1e9, whole=False),
    "watts": Question("power at the wall, under load (W)", 1, 1e6, whole=False),
}
