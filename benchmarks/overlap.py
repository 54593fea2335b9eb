"""Drafting while the target verifies, on cores of its own, against drafting in turn on all of them."""

from __future__ import annotations

import statistics

from common import MeasureError, Row
from depths import N_TOKENS
from drafting import ADAPTIVE, Section, Setup, Side, Table, compare, figures, model_info, tokens_per_pass, workers
from pairs import typical_texts
from product import answer

from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import read_topology

ALPHA = 0.9
QUANTIZATIONS = ("Q8_0", "F16")
HEADS = ("target", "cores", "speed", "against plain on all cores", "tokens per pass", "depth at the end", "overlap")


def overlap(setup: Setup) -> Section:
    """With the draft on a core of its own the target computes on one core less."""
    cores = choose_cores(read_topology(), "all").cpus
    if len(cores) < 2:
        raise MeasureError("overlap takes two cores")
    own = str(cores[-1])
    n_rounds = setup.choose(3)
    section = Section(tables=[Table(f"draft on its own core, α {ALPHA:g}", HEADS)])
    for quantization in QUANTIZATIONS[: 1 if setup.quick else None]:
        n = 33 if setup.quick else N_TOKENS[quantization]
        target, draft = setup.shapes.target_file(quantization), setup.shapes.draft_file(ALPHA)
        texts = typical_texts(setup.shapes.n_vocab, ALPHA, n, n_rounds + 1, (3, 7))
        with workers(setup.threads) as loaded:
            shared, split = loaded.load(target, draft), loaded.load(target, draft, own)
            chosen = loaded.load(target, draft, "auto")
            auto = model_info(chosen).draft_cpus
            loaded.run(chosen.close())
            for backend in (shared, split):
                loaded.run(answer(backend, texts[-1].prompt_text, 8))
                loaded.run(answer(backend, texts[-1].prompt_text, n, speculation=ADAPTIVE))
            sides = {
                "plain": Side(shared),
                "in turn, all cores": Side(shared, ADAPTIVE),
                f"at once, draft on core {own}": Side(split, ADAPTIVE),
            }
            runs = compare(loaded, sides, texts[:-1], n)
        in_turn, at_once = list(sides)[1:]
        name = f"{quantization}, α {ALPHA:g}: at once against in turn"
        section.rows.append(Row(name, "tok/s", runs.rates(at_once), runs.rates(in_turn)))
        for side, answers in runs.answers.items():
            found = [figures(done) for done in answers] if sides[side].speculation.drafters else []
            section.tables[0].lines.append(
                [
                    quantization,
                    side,
                    f"{statistics.median(runs.rates(side)):.1f} tok/s",
                    f"{runs.ratio(side):.2f}×",
                    f"{tokens_per_pass(answers):.2f}" if found else "–",
                    str(found[-1].depth) if found else "–",
                    ("yes" if found[-1].overlap else "no") if found else "–",
                ]
            )
        where = ", ".join(map(str, auto)) or "none"
        section.remarks += [
            f'{quantization}: "auto" put the draft on cores {where}',
            f"{quantization}: {runs.wrong()} of {runs.count()} answers are not the known text",
        ]
        section.data[quantization] = {side: runs.rates(side) for side in sides} | {"auto": auto}
    return section
