"""The demo models, which are real if tiny, on questions that they were not trained on."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path

from common import Row, Target, alternate
from drafting import ADAPTIVE, Section, Setup, Table, Workers, adaptive, figures, model_info, workers
from product import GREEDY, PLAIN, Answer, ask

from cpuchat.backend.local import LocalBackend
from cpuchat.base.paths import demo_dir
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import Generate, Message, Speculation

QUESTIONS = Path(__file__).parents[1] / "demo"
MAX_TOKENS = 96
NEVER_SLOWER = Target(0.98)
SIDES = {
    "plain": PLAIN,
    "draft": ADAPTIVE,
    "draft, depth 3": Speculation(drafters=("draft",), depth=3),
    "lookup + suffix": adaptive("lookup", "suffix"),
    "all three": adaptive("draft", "lookup", "suffix"),
}
HEADS = (
    "target",
    "drafters",
    "speed",
    "against plain",
    "acceptance",
    "tokens per pass",
    "T(2), T(4), T(8)",
    "off at the end because",
)


def questions() -> list[str]:
    """Those that the demo models are judged by."""
    files = sorted(QUESTIONS.glob("heldback_*.toml"))
    return [entry["text"] for file in files for entry in tomllib.loads(file.read_text(encoding="utf-8"))["question"]]


def _all(loaded: Workers, backend: LocalBackend, asked: list[str], speculation: Speculation) -> list[Answer]:
    requests = [
        Generate(
            messages=(Message(role="user", content=text),),
            sampling=GREEDY,
            max_tokens=MAX_TOKENS,
            speculation=speculation,
        )
        for text in asked
    ]
    return [loaded.run(ask(backend, request)) for request in requests]


def _rate(answers: list[Answer]) -> float:
    """Decode tok/s over all answers, long ones counting more."""
    total = sum(done.timings.predicted_ms for done in answers)
    return 1e3 * sum(done.timings.predicted_n - 1 for done in answers) / total


def demo(setup: Setup) -> Section:
    """Both quantizations of the demo target with the demo draft; one chat of one question per answer."""
    asked = questions()[: 4 if setup.quick else None]
    section = Section(tables=[Table(f"{len(asked)} questions", HEADS)])
    for name in ("demo", "demo-q4"):
        runs, pass_ms = _measure(setup, name, asked)
        _report(section, name, runs, pass_ms)
    return section


def _measure(setup: Setup, name: str, asked: list[str]) -> tuple[dict[str, list[list[Answer]]], Sequence[float]]:
    runs: dict[str, list[list[Answer]]] = {side: [] for side in SIDES}
    with workers(setup.threads) as loaded:
        backend = loaded.load(demo_dir() / DEMO_FILES[name], demo_dir() / DEMO_FILES["demo-draft"])

        def once(side: str) -> float:
            runs[side].append(_all(loaded, backend, asked, SIDES[side]))
            return _rate(runs[side][-1])

        for warm_up in (PLAIN, ADAPTIVE):
            _all(loaded, backend, asked[:2], warm_up)
        alternate(setup.choose(3), {side: (lambda side=side: once(side)) for side in SIDES})
        return runs, model_info(backend).pass_ms


def _report(section: Section, name: str, runs: dict[str, list[list[Answer]]], pass_ms: Sequence[float]) -> None:
    rates = {side: [_rate(answers) for answers in rounds] for side, rounds in runs.items()}
    plain = [done.text for done in runs["plain"][0]]
    others = [answers for rounds in runs.values() for answers in rounds]
    wrong = sum(done.text != text for answers in others for done, text in zip(answers, plain, strict=True))
    costs = ", ".join(f"{pass_ms[n - 1] / pass_ms[0]:.2f}" for n in (2, 4, 8) if n <= len(pass_ms)) or "–"
    for side, rounds in runs.items():
        if side == "plain":
            continue
        target = None if SIDES[side].depth else NEVER_SLOWER
        section.rows.append(Row(f"{name}: {side}", "tok/s", rates[side], rates["plain"], target))
        found = [figures(done) for answers in rounds for done in answers]
        drafted, accepted = sum(one.draft_n for one in found), sum(one.draft_n_accepted for one in found)
        # The first token comes out of reading the prompt; the one that ends an answer costs a pass and is not written.
        written = sum(done.timings.predicted_n - (done.stop_reason != "end") for answers in rounds for done in answers)
        ratio = statistics.median(a / b for a, b in zip(rates[side], rates["plain"], strict=True))
        section.tables[0].lines.append(
            [
                name,
                side,
                f"{statistics.median(rates[side]):.0f} tok/s",
                f"{ratio:.2f}×",
                f"{accepted / drafted:.2f}" if drafted else "nothing drafted",
                f"{written / max(sum(one.passes for one in found), 1):.2f}",
                costs,
                found[-1].reason or "(on)",
            ]
        )
    section.remarks.append(
        f"{name}: {wrong} of {sum(map(len, others))} answers differ from the first plain one; {len(plain)} questions, "
        f"greedy, at most {MAX_TOKENS} tokens"
    )
    section.data[name] = rates
