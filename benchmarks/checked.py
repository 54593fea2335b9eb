"""Prompts whose answers are code: what recordings and pictures show has been run, and does what was asked."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from common import MeasureError

_BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
_SECONDS = 20


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt, and a program that fails if the code of the answer, which is its `answer`, is wrong."""

    text: str
    program: str

    def check(self, answer: str) -> None:
        """Run the code of an answer, in a process of its own. Raises MeasureError: it is wrong, or there is none."""
        if (block := _BLOCK.search(answer)) is None:
            raise MeasureError(f"The answer has no code: {answer[:200]!r}")
        command = [sys.executable, "-I", "-c", f"answer = {block[1]!r}\n{self.program}"]
        with tempfile.TemporaryDirectory() as folder:
            try:
                done = subprocess.run(command, cwd=folder, timeout=_SECONDS, capture_output=True, text=True)
            except subprocess.TimeoutExpired:
                raise MeasureError(f"The code of the answer does not end:\n{block[1]}") from None
        if done.returncode:
            raise MeasureError(f"The code of the answer is wrong:\n{block[1]}\n{done.stderr}")


_STATISTICS = """def mean(values):
    return sum(values) / len(values)

def variance(values):
    average = mean(values)
    return sum((value - average) ** 2 for value in values) / len(values)

def histogram(values, bins):
    low, high = min(values), max(values)
    width = (high - low) / bins
    counts = [0] * bins
    for value in values:
        index = min(int((value - low) / width), bins - 1)
        counts[index] += 1
    return counts
"""

HINTS = CheckedPrompt(
    f"Add type hints to this code and change nothing else:\n\n{_STATISTICS}",
    f"""
import ast
tree = ast.parse(answer)
tree.body = [one for one in tree.body if not isinstance(one, (ast.Import, ast.ImportFrom))]
for function in tree.body:
    arguments = function.args.args
    assert function.returns and all(one.annotation for one in arguments), "hints are missing"
    function.returns = None
    for one in arguments:
        one.annotation = None
assert ast.unparse(tree) == ast.unparse(ast.parse({_STATISTICS!r})), "the code was changed"
exec(answer)
""",
)
"""An answer that repeats code: what suffix decoding is for."""
INTERVALS = CheckedPrompt(
    "Write a Python function that merges overlapping intervals. Answer with the code alone.",
    """
found = {}
exec(answer, found)
merge = next(one for name, one in found.items() if name != "__builtins__" and callable(one))
def merged(*intervals):
    return [tuple(one) for one in merge([list(one) for one in intervals])]
assert merged((8, 10), (1, 3), (2, 6), (15, 18)) == [(1, 6), (8, 10), (15, 18)]
assert merged((1, 4), (4, 5)) == [(1, 5)] and merged((1, 9), (2, 3)) == [(1, 9)]
assert merged((5, 7)) == [(5, 7)]
""",
)
SQL = CheckedPrompt(
    "A table named orders (customer TEXT, amount REAL, day TEXT) holds days as 2025-12-31. "
    "Write a SQL query for the three customers who spent most in 2025. Answer with the query alone.",
    """
import sqlite3
db = sqlite3.connect(":memory:")
db.execute("CREATE TABLE orders(customer TEXT, amount REAL, day TEXT)")
days = ("2024-12-31", "2025-01-01", "2025-06-15", "2025-12-31", "2026-01-01")
spent = {"Ada": (900, 1, 1, 1, 0), "Bo": (0, 10, 0, 30, 0), "Cy": (0, 0, 50, 0, 900), "Di": (1, 5, 5, 20, 1)}
for customer, amounts in spent.items():
    db.executemany("INSERT INTO orders VALUES (?, ?, ?)", [(customer, *one) for one in zip(amounts, days)])
assert [row[0] for row in db.execute(answer)] == ["Cy", "Bo", "Di"]
""",
)
