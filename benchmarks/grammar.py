"""Decoding under a grammar with decoding without one: same model, same prompt, same number of tokens.

    python benchmarks/grammar.py [--quick] [--rounds N] [--tokens N]

A 0.5B-shape model that knows nothing of JSON: a list of long strings, of which it writes nearly every token by itself,
and a list of records with names, numbers and choices, where most tokens are found against its will: the worst case.
And Gemma 3 270M (262k tokens), which continues records that its prompt begins: a real model's own text.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import models
from base_model import base_model
from common import MeasureError, Row, Target, arguments, machine, report, run_main, say, spread
from product import GREEDY, ask, worker

from cpuchat.grammar.schema import schema_grammar
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import Generate, LoadOptions, Sampling

SAMPLINGS = {"greedy": GREEDY, "app defaults": Sampling(seed=1)}
TARGET = Target(0.9)
STRINGS = {"type": "array", "items": {"type": "string", "minLength": 1000}, "minItems": 50}
RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 3, "maxLength": 24},
            "country": {"enum": ["France", "Germany", "Italy", "Japan", "Spain"]},
            "population": {"type": "integer", "minimum": 1000, "maximum": 40_000_000},
            "capital": {"type": "boolean"},
        },
        "required": ["city", "country", "population", "capital"],
    },
    "minItems": 50,
}
REAL_PROMPT = """A JSON list of fifty cities, with the country, the number of people who live there, and whether it is
the capital of that country. The first two records are {"city": "Paris", "country": "France", "population": 2102650,
"capital": true} and {"city": "Hamburg", "country": "Germany", "population": 1945532, "capital": false}. The whole list:

"""


async def _rates(file: Path, prompt: str, grammar: str, tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """tok/s by sampling and side, the sides in turn in one worker, after an answer of each that does not count."""
    found: dict[str, dict[str, list[float]]] = {name: {"grammar": [], "free": []} for name in SAMPLINGS}
    # A core is left for this process, which takes the text.
    async with worker(file, LoadOptions(n_ctx=1024), PlacementSpec(threads=max(1, machine().cores - 1))) as backend:
        for number in range(-1, rounds):
            for name, sampling in SAMPLINGS.items():
                sides = ["grammar", "free"] if number % 2 else ["free", "grammar"]
                for side in sides:
                    request = Generate(
                        prompt=prompt,
                        sampling=sampling,
                        max_tokens=tokens,
                        grammar=grammar if side == "grammar" else "",
                        ignore_eos=side == "free",
                    )
                    done = await ask(backend, request)
                    if done.timings.predicted_n < tokens or done.timings.predicted_per_second is None:
                        raise MeasureError(f"{file.name} ended after {done.timings.predicted_n} tokens")
                    if number >= 0:
                        found[name][side].append(done.timings.predicted_per_second)
                rates = {side: f"{spread(values[-1:])} tok/s" for side, values in found[name].items() if values}
                say(f"  round {number + 1}/{rounds} {file.stem}, {name}: {rates}")
    return found


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=160, help="length of the answers")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    rounds = options.rounds or (1 if options.quick else 5)
    tokens = 40 if options.quick else options.tokens
    half = models.model("0.5b", "Q4_K_M")
    cases = [
        ("0.5B Q4_K_M, strings", half, models.words(16, salt=1), STRINGS, TARGET),
        ("0.5B Q4_K_M, records against its will", half, models.words(16, salt=1), RECORDS, None),
        ("Gemma 3 270M Q4_K_M, records", base_model(), REAL_PROMPT, RECORDS, TARGET),
    ]
    rows: list[Row] = []
    for what, file, prompt, schema, target in cases:
        found = asyncio.run(_rates(file, prompt, schema_grammar(schema, what), tokens, rounds))
        rows += [
            Row(f"{what}, {name}", "tok/s", sides["grammar"], sides["free"], target) for name, sides in found.items()
        ]
    report("grammar", where, rows, quick=options.quick, remarks=["baseline: the same model without a grammar"])


if __name__ == "__main__":
    run_main(main)
