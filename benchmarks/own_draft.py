"""A model's Q4_K_M file as the draft model of its Q8_0: short answers in one worker, plain, with drafts at the adaptive
depth and at two fixed ones, in an order drawn at random; and its acceptance.

    python benchmarks/own_draft.py [--quick] [--rounds 12] [--target FILE --draft FILE] [--tokens 64]

The prompts are those of real_text.toml. All answers to a prompt follow each other at once, so that the machine's own
drift is in all of them. --quick takes the demo's two files, which draft nothing by themselves: decoding is too fast.
"""

from __future__ import annotations

import argparse
import random
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agreement import DEMO, PAIR
from common import HERE, Row, arguments, machine, report, run_main, say
from drafting import acceptance, adaptive, figures, fixed, model_info, workers
from never_slower import judge
from product import PLAIN, Answer, answer, default_threads


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--target", type=Path, default=PAIR[0])
        parser.add_argument("--draft", type=Path, default=PAIR[1])
        parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")

    options = arguments(__doc__, more)
    where = machine()
    target, draft = DEMO if options.quick else (options.target, options.draft)
    n_pairs, n = (2, 16) if options.quick else (options.rounds or 12, options.tokens)
    prompts = [task["prompt"] for task in tomllib.loads((HERE / "real_text.toml").read_text())["task"]]
    ways = {"plain": PLAIN, "adaptive": adaptive("draft"), "depth 1": fixed(1), "depth 2": fixed(2)}
    rng, done, wrong = random.Random(3), {side: list[Answer]() for side in ways}, 0
    with workers(default_threads()) as loaded:
        backend = loaded.load(target, draft)
        costs = model_info(backend).pass_ms
        loaded.run(answer(backend, prompts[-1], 8, to_the_end=False))
        for number in range(n_pairs):
            prompt = prompts[number % len(prompts)]
            for side in rng.sample([*ways], len(ways)):
                done[side].append(loaded.run(answer(backend, prompt, n, speculation=ways[side], to_the_end=False)))
            newest = [done[side][-1] for side in ways]
            wrong += any(one.text != newest[0].text for one in newest)
            rates = ", ".join(f"{side} {one.rate:.2f}" for side, one in zip(ways, newest, strict=True))
            say(f"  {number + 1} of {n_pairs}: {rates} tok/s")
    section = judge("own draft", done, wrong)
    section.rows += [
        Row(f"own draft: {side} against plain", "tok/s", *([one.rate for one in done[way]] for way in (side, "plain")))
        for side in ("depth 1", "depth 2")
    ]
    for depth in (1, 2):
        answers = done[f"depth {depth}"]
        accepted, compared = acceptance(answers, depth)
        drafted, took = sum(figures(one).draft_n for one in answers), sum(figures(one).draft_ms for one in answers)
        cost = f"{took / drafted:.1f} ms per drafted token, reading the prompt included"
        section.remarks.append(f"depth {depth}: {accepted} of {compared} compared tokens accepted, {cost}")
    words = ", ".join(f"{costs[n - 1]:.1f}" for n in (1, 2, 3, 5)) if costs else "disturbed"
    section.remarks.append(f"calibrated passes of 1, 2, 3, 5 tokens: {words} ms")
    report("own_draft", where, section.rows, quick=options.quick, remarks=section.remarks)


if __name__ == "__main__":
    run_main(main)
