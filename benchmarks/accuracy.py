"""Do the figures that the app shows tell the truth? Measured acceptance and tokens per pass over long texts."""

from __future__ import annotations

from dataclasses import replace

from common import Row, Target
from depths import ALPHAS
from drafting import Section, Setup, Table, acceptance, fixed, tokens_per_pass, workers
from drafting import figures as of
from pairs import expected_tokens, known, text_at
from product import answer

N_TOKENS, N_CTX = 5000, 8192
DEPTHS = (1, 3, 7, 15)
LONGEST = 7
"""Depth of a pair whose alpha is below 0.8: deeper tokens are hardly ever reached."""
CLOSE, NEAR = Target(0.02, False), Target(0.05, False)
HEADS = (
    "α",
    "depth",
    "acceptance: measured / known / nominal",
    "tokens per pass: measured / known / formula",
)


def accuracy(setup: Setup) -> Section:
    """A pair of the smallest shapes: what is measured does not depend on the size, and 5,000 tokens take seconds."""
    n = 300 if setup.quick else N_TOKENS
    shapes = replace(setup.shapes, target="tiny", draft="tiny", layers=2, draft_layers=1)
    target = shapes.target_file("Q8_0")
    table = Table("known and measured, one answer each", HEADS)
    off_rate, off_passes, wrong_texts, wrong_passes = [], [], 0, 0
    for alpha in (0.6, 1.0) if setup.quick else ALPHAS:
        text = text_at(shapes.n_vocab, alpha, 0, n)
        with workers(setup.threads) as loaded:
            backend = loaded.load(target, shapes.draft_file(alpha), n_ctx=N_CTX, calibrate=False)
            for depth in DEPTHS:
                if alpha < 0.8 and depth > LONGEST:
                    continue
                done = loaded.run(answer(backend, text.prompt_text, n, speculation=fixed(depth)))
                accepted, compared = acceptance([done], depth)
                rate, passes = accepted / compared, tokens_per_pass([done])
                true, formula = known(text, depth), expected_tokens(alpha, depth)
                wrong_texts += done.text != text.future_text
                wrong_passes += of(done).passes != true.passes
                off_rate.append(abs(rate - alpha))
                off_passes.append(abs(passes / formula - 1))
                acceptances = f"{rate:.4f} / {true.acceptance:.4f} / {alpha:g}"
                table.lines.append(
                    [
                        f"{alpha:g}",
                        str(depth),
                        acceptances,
                        f"{passes:.3f} / {true.tokens_per_pass:.3f} / {formula:.3f}",
                    ]
                )
    answers = len(table.lines)
    return Section(
        rows=[
            Row("acceptance off the pair's rate, worst", "", [max(off_rate)], target=CLOSE),
            Row("tokens per pass off the formula, worst", "", [max(off_passes)], target=NEAR),
        ],
        tables=[table],
        remarks=[
            f"{n} tokens each; {wrong_texts} of {answers} answers are not, to the letter, what the target is known to "
            f"say, {wrong_passes} took another number of passes than the pair is known to need",
            "known: counted from the pair's two tables over exactly the tokens that were written; nominal: the share "
            "of all words that the draft was made to be right about",
        ],
        data={"lines": table.lines},
    )
