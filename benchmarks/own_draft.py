"""A model's Q4_K_M file as the draft model of its Q8_0: pairs of short answers in one worker, plain and with drafts at
the adaptive depth, in an order drawn at random; and its acceptance.

    python benchmarks/own_draft.py [--quick] [--rounds 12] [--target FILE --draft FILE] [--tokens 64]

The prompts are those of real_text.toml. Both answers to a prompt follow each other at once, so that the machine's own
drift is in both. --quick takes the demo's two files, which draft nothing by themselves: decoding is too fast.
"""

from __future__ import annotations

import argparse
import random
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agreement import DEMO, PAIR
from common import HERE, arguments, machine, report, run_main, say
from drafting import adaptive, figures, model_info, workers
from never_slower import judge
from product import PLAIN, Answer, answer, default_threads

from cpuchat.models.drafts.candidates import expectation


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
    rng, done, wrong = random.Random(3), dict[str, list[Answer]](plain=[], adaptive=[]), 0
    with workers(default_threads()) as loaded:
        backend = loaded.load(target, draft)
        costs = model_info(backend).pass_ms
        loaded.run(answer(backend, prompts[-1], 8, to_the_end=False))
        for number in range(n_pairs):
            sides = [("plain", PLAIN), ("adaptive", adaptive("draft"))]
            rng.shuffle(sides)
            for side, wanted in sides:
                prompt = prompts[number % len(prompts)]
                done[side].append(loaded.run(answer(backend, prompt, n, speculation=wanted, to_the_end=False)))
            a, b = done["adaptive"][-1], done["plain"][-1]
            wrong += a.text != b.text
            say(f"  {number + 1} of {n_pairs}: {a.rate:.2f} against {b.rate:.2f} tok/s, {a.rate / b.rate:.3f}×")
    section = judge(f"{draft.stem} for {target.stem}", done, wrong)
    found = [figures(one) for one in done["adaptive"]]
    drafted, accepted = sum(one.draft_n for one in found), sum(one.draft_n_accepted for one in found)
    passes, tokens = sum(one.passes for one in found), sum(one.timings.predicted_n for one in done["adaptive"])
    section.remarks += [
        f"accepted {accepted} of {drafted} drafted tokens; {tokens} tokens in {passes} passes",
        f"calibrated passes of 1, 2, 3, 5 tokens: {', '.join(f'{costs[n - 1]:.1f}' for n in (1, 2, 3, 5))} ms"
        if costs
        else "other programs disturbed the calibration",
        f"drafting took {sum(one.draft_ms for one in found):.0f} ms",
    ]
    if costs and drafted:
        per_token = sum(one.draft_ms for one in found) / drafted
        section.remarks.append(expectation(costs, per_token, "", same_model=True).words)
    report("own_draft", where, section.rows, quick=options.quick, remarks=section.remarks)


if __name__ == "__main__":
    run_main(main)
