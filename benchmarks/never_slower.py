"""What adaptive drafting costs where it cannot pay: pairs of short answers in one worker, in an order drawn at random.

Two answers to the same prompt follow each other at once, so that the machine's own drift is in both; the median of many
such ratios tells 1 % from noise that is ten times as large. The worker begins with a pair of models that it knows
nothing about.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from common import MeasureError, Row, Target, say
from drafting import Section, Setup, Table, adaptive, figures, workers
from pairs import Shapes, Text, text_at
from product import GREEDY, PLAIN, Answer, answer

from cpuchat.present.drafts_off import off_words
from cpuchat.protocol.messages import Sampling, Speculation

QUANTIZATION = "Q8_0"
ALPHA = 0.3
PAIRS, N_TOKENS = 60, 41
DRAWN = Sampling(temperature=1.0, top_k=40, top_p=1.0, min_p=0.0)
"""At random from 40 nearly equal tokens each time; both sides of a pair draw with the same seed."""
WHOLE, SURE = Target(0.99), Target(0.98)
DRAWS = 4000
EVERYTHING, FREE = adaptive("draft", "suffix"), adaptive("suffix")  # what `auto` and `suffix` use
HEADS = ("text", "pairs", "adaptive ÷ plain", "95 % interval", "the first ten", "draft model's share", "drafted")


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median: bootstrap, `DRAWS` samples."""
    values, rng = np.asarray(ratios), np.random.default_rng(1)
    medians = np.median(values[rng.integers(0, len(values), (DRAWS, len(values)))], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def hopeless_pair(setup: Setup) -> Section:
    """A draft that is right about three tokens of ten: nothing it drafts can pay."""
    shapes = setup.shapes
    return paired_answers(
        setup, f"pair of α {ALPHA:g}", shapes.target_file(QUANTIZATION), shapes.draft_file(ALPHA), EVERYTHING
    )


def free_drafters(setup: Setup) -> Section:
    """Only suffix decoding, over a text in which nothing repeats."""
    return paired_answers(setup, "free drafters", setup.shapes.target_file(QUANTIZATION), None, FREE)


def noise(setup: Setup) -> Section:
    """Text that nothing can predict, drawn from nearly equal tokens, with both drafters."""
    shapes = setup.shapes
    return paired_answers(setup, "noise", shapes.noise_file(QUANTIZATION), shapes.draft_file(1.0), EVERYTHING, DRAWN)


def paired_answers(
    setup: Setup,
    what: str,
    target: Path,
    draft: Path | None,
    wanted: Speculation,
    sampling: Sampling | None = None,
    sure: Target = SURE,
) -> Section:
    """Plain and drafted answers to the same prompts in pairs, in one worker that knows nothing of the draft. `sure`: of
    the lower end of the interval."""
    pairs, n = (4, 17) if setup.quick else (setup.rounds or PAIRS, N_TOKENS)
    rng = random.Random(3)
    done: dict[str, list[Answer]] = {"plain": [], "adaptive": []}
    wrong = 0
    with workers(setup.threads) as loaded:
        backend = loaded.load(target, draft)
        texts = _texts(setup.shapes, pairs + 1, n)
        loaded.run(answer(backend, texts[-1].prompt_text, 8))
        for number, text in enumerate(texts[:-1], 1):
            sides = [("plain", PLAIN), ("adaptive", wanted)]
            rng.shuffle(sides)
            drawn = msgspec.structs.replace(sampling, seed=number) if sampling else GREEDY
            try:
                pair = [
                    (side, loaded.run(answer(backend, text.prompt_text, n, sampling=drawn, speculation=speculation)))
                    for side, speculation in sides
                ]
            except MeasureError as error:
                if sampling is None:
                    raise
                say(f"  left out: {error}")  # the end of the text was drawn
                continue
            for side, one in pair:
                wrong += sampling is None and one.text != text.future_text
                done[side].append(one)
            if number % 10 == 0:
                say(f"  {what}: {number} of {pairs} pairs")
    return judge(what, done, wrong, sure)


def _texts(shapes: Shapes, count: int, n: int) -> list[Text]:
    return [text_at(shapes.n_vocab, ALPHA, 997 * number, n) for number in range(count)]


def judge(what: str, done: dict[str, list[Answer]], wrong: int, sure: Target = SURE) -> Section:
    ours, theirs = ([one.rate for one in done[side]] for side in ("adaptive", "plain"))
    if not all(theirs):
        raise MeasureError("a plain answer has no rate")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = interval(ratios)
    found = [figures(one) for one in done["adaptive"]]
    share = sum(one.draft_ms for one in found) / sum(one.timings.predicted_ms for one in done["adaptive"])
    first = float(np.median(ratios[:10]))
    line = [
        what,
        str(len(ratios)),
        f"{np.median(ratios):.4f}",
        f"{low:.4f} to {high:.4f}",
        f"{first:.4f}",
        f"{share:.2%}",
        str(sum(one.draft_n for one in found)),
    ]
    return Section(
        rows=[
            Row(f"{what}: adaptive against plain", "tok/s", ours, theirs, WHOLE),
            Row(f"{what}: lower end of the 95 % interval", "×", [low], target=sure),
        ],
        tables=[Table("paired answers", HEADS, [line])],
        remarks=[
            f"{what}: {wrong} answers are not what the target is known to say",
            off_words(found[-1].off) or "(on)",
        ],
        data={"ratios": ratios, "interval": [low, high], "draft_share": share},
    )
