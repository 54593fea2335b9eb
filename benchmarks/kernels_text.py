"""What cpuchat's kernels and llama.cpp's repacked ones lose against llama.cpp's plain path, and equal text and logits.

    python benchmarks/kernels_text.py [--quick] [--only loss,text,passes] [--file FILE] [--first N] [--rounds N]

The same file is loaded without extra buffer types, with llama.cpp's (repack, AMX) and with cpuchat's kernels.
- loss: KLD, equal top tokens and perplexity over windows of 512 tokens of the built-in texts, as `cpuchat quality`.
- text: greedy answers of 48 tokens: how many are equal to the plain path's, else where they part, and by how little.
- passes: logits after 32 tokens, behind none and 520 others, by eights and at once, beside those of one by one: how
  often they are equal bit by bit, else how far apart. `--rounds` windows or prompts from `--first` on.
"""

from __future__ import annotations

import argparse
import math
import os
from contextlib import closing
from itertools import product
from pathlib import Path

import numpy as np
from coder_pair import coder_pair
from common import arguments, machine, run_main, say, table
from product import default_threads

from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.model import Model
from cpuchat.protocol.messages import LoadOptions
from cpuchat.quality.messages import RowComparer
from cpuchat.quality.statistics import Scores, summarize
from cpuchat.quality.texts import code, dialogues, prose

N_CTX, WINDOW, LENGTH = 1024, 512, 48
SIDES = {
    "plain": LoadOptions(n_ctx=N_CTX, use_repack=False),
    "llama.cpp": LoadOptions(n_ctx=N_CTX),
    "cpuchat": LoadOptions(n_ctx=N_CTX, kernels="auto"),
}
BASE, *OTHERS = SIDES
WIDTHS, DEPTHS, READ = (1, 8, 32), (0, 520), 32
Models = dict[str, Model]


def prompts(model: Model) -> list[list[int]]:
    """The questions of the built-in dialogues, each the first of a chat."""
    asked = [one.content for dialogue in dialogues() for one in dialogue if one.role == "user"]
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [model.vocab.tokenize_prompt(form.format(one).encode()) for one in asked]


def loss(models: Models, first: int, rounds: int, cpus: tuple[int, ...]) -> list[list[str]]:
    text, half = models[BASE].vocab.tokenize_prompt(f"{prose()}\n{code()}".encode()), WINDOW // 2
    windows = [text[at : at + WINDOW] for at in range(0, len(text) - WINDOW, WINDOW)]
    scores: dict[str, list[Scores]] = {side: [] for side in OTHERS}
    with closing(RowComparer(cpus, models[BASE].vocab.n_tokens)) as comparer:
        for window in windows[first :: max(1, len(windows) // rounds)][:rounds]:  # of prose and code
            rows: dict[str, list[np.ndarray]] = {}
            for side, model in models.items():
                model.sequence.clear()
                model.sequence.extend(window[:half])
                model.sequence.extend(window[half:-1], n_outputs=half - 1)
                rows[side] = [model.sequence.logits(i) for i in range(half - 1)]
            for side in OTHERS:
                scores[side].append(comparer.compare(rows[BASE], rows[side], window[half + 1 :])[0])
            say("  a window: KLD " + ", ".join(f"{side} {np.mean(scores[side][-1].kld):.2e}" for side in OTHERS))
    lines: list[list[str]] = []
    for side, found in ((side, summarize(scores[side])) for side in OTHERS):
        same = f"{found.same_top.value:.2%} ({found.same_top.low:.2%}–{found.same_top.high:.2%}) of {found.n}"
        kld = f"{found.kld.value:.2e} ± {found.kld.half:.1e}, 99 %: {found.kld_99:.1e}"
        lines.append([side, kld, same, f"{found.ppl_other:.4f} (plain {found.ppl_base:.4f})"])
    return lines


def written(model: Model, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return a greedy answer, and how far the best logit is above the next at each of its tokens."""
    model.sequence.clear()
    model.sequence.extend(prompt, n_outputs=1)
    row, text, leads = model.sequence.logits(len(prompt) - 1), list[int](), list[float]()
    while len(text) < LENGTH and not (text and model.vocab.is_eog(text[-1])):
        row = model.sequence.step(text[-1]) if text else row
        second, best = np.partition(row, -2)[-2:]
        leads.append(float(best - second))
        text.append(int(row.argmax()))
    return text, leads


def text(models: Models, first: int, rounds: int, _: tuple[int, ...]) -> list[list[str]]:
    parted: dict[str, list[str]] = {side: [] for side in OTHERS}
    chosen = prompts(models[BASE])[first : first + rounds]
    for number, prompt in enumerate(chosen):
        plain, leads = written(models[BASE], prompt)
        for side in OTHERS:
            other, _leads = written(models[side], prompt)
            if plain != other:
                at = next(i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b)
                parted[side].append(f"{at} ({leads[at]:.2f})")
        say(f"  prompt {number + 1} of {len(chosen)}: {parted}")
    return [[side, f"{len(chosen) - len(at)} of {len(chosen)}", ", ".join(at)] for side, at in parted.items()]


def passes(models: Models, first: int, rounds: int, _: tuple[int, ...]) -> list[list[str]]:
    lines: list[list[str]] = []
    source = models[BASE].vocab.tokenize_prompt(code().encode())
    for depth, side in product(DEPTHS, OTHERS):
        sequence, apart = models[side].sequence, {width: list[float]() for width in WIDTHS[1:]}
        for number in range(first, first + rounds):
            text, last = source[1000 * number :][: depth + READ], dict[int, np.ndarray]()
            sequence.clear()
            for at in range(0, depth, 260):
                sequence.extend(text[at : min(at + 260, depth)])
            for width in WIDTHS:
                sequence.truncate(depth)
                for at in range(depth, depth + READ, width):
                    sequence.extend(text[at : at + width], n_outputs=1)
                last[width] = sequence.logits(width - 1).copy()
            for width, far in apart.items():
                is_equal = last[width].tobytes() == last[1].tobytes()
                far.append(0.0 if is_equal else float(np.abs(last[width] - last[1]).max()))
        cells = (f"{sum(not one for one in far)} of {rounds}, ≤ {max(far):.2g}" for far in apart.values())
        lines.append([f"{side}, behind {depth}", *cells])
    return lines


PARTS = {
    "loss": (loss, 6, ("kernels", "KLD to plain", "same top token", "perplexity")),
    "text": (text, 50, ("kernels", "equal to plain", "where others part (plain's lead there)")),
    "passes": (passes, 1, ("kernels", *(f"equal by {width}, apart" for width in WIDTHS[1:]))),
}


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default=",".join(PARTS))
        parser.add_argument("--file", type=Path, default=None, help="default: the Coder 1.5B in Q4_K_M")
        parser.add_argument("--first", type=int, default=0)

    given = arguments(__doc__, more)
    where, cpus = machine(), tuple(sorted(os.sched_getaffinity(0)))[: default_threads()]
    file: Path = given.file or coder_pair()[0]
    bindings.start()
    models: Models = {}
    for side, options in SIDES.items():
        pool = models[BASE].pool if models else cpus
        models[side] = Model.load(
            file, options, pool, on_progress=lambda *_: None, abort=bindings.AbortFlag(), n_outputs=WINDOW // 2
        )
    models[BASE].pool._next_look = math.inf  # all threads, whatever other programs do
    print(f"\nkernels_text - {where}\n\n{file.name}")
    for measure, rounds, heads in (PARTS[name] for name in given.only.split(",")):
        lines = measure(models, given.first, given.rounds or (1 if given.quick else rounds), cpus)
        print(f"\n{table(lines, heads)}", flush=True)


if __name__ == "__main__":
    run_main(main)
