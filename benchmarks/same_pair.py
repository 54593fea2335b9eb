"""The same pair at the same depth: cpuchat against llama-server (with and without OpenMP) drafting by itself."""

from __future__ import annotations

import statistics
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from baselines import Completion, LlamaServer, llama_server
from common import Row, Target, alternate, say
from drafting import Section, Setup, Side, Table, figures, fixed, workers
from pairs import known, typical_texts
from product import PLAIN, Answer, answer

QUANTIZATION = "Q8_0"
ALPHAS = (0.9, 1.0)
DEPTHS = (3, 7, 15)
N_TOKENS, N_CTX = 97, 2048
FASTER = Target(1.08)
HEADS = (
    "α, depth",
    "ratio, own clocks",
    "to the build without OpenMP, with",
    "ratio, seen by the client",
    "drafted: cpuchat / llama-server",
    "accepted: cpuchat / llama-server",
)


class _Pair:
    """Both sides' answers at one acceptance rate and depth (0: plain decoding). `builds` by whether with OpenMP."""

    def __init__(self, alpha: float, depth: int) -> None:
        self.alpha = alpha
        self.depth = depth
        self.ours: list[Answer] = []
        self.builds: dict[bool, list[Completion]] = {False: [], True: []}
        self.wrong = 0

    @property
    def theirs(self) -> list[Completion]:
        """The answers of the faster build."""
        return max(self.builds.values(), key=lambda answers: statistics.median(done.rate for done in answers))

    @property
    def name(self) -> str:
        return f"{QUANTIZATION}, α {self.alpha:g}, depth {self.depth}" if self.depth else f"{QUANTIZATION}, plain"

    def rates(self) -> tuple[list[float], list[float]]:
        """Each side by its own clock: from the first to the last token."""
        return [done.rate for done in self.ours], [done.rate for done in self.theirs]

    def seen(self) -> tuple[list[float], list[float]]:
        """Tokens per second of the whole answer as this process saw it, reading the prompt included."""
        ours = [1e3 * done.timings.predicted_n / done.total_ms for done in self.ours]
        return ours, [1e3 * done.predicted_n / done.total_ms for done in self.theirs]

    def line(self) -> list[str]:
        own, seen = (_median(*pair) for pair in (self.rates(), self.seen()))
        drafted = sum(figures(done).draft_n for done in self.ours) if self.depth else 0
        accepted = sum(figures(done).draft_n_accepted for done in self.ours) if self.depth else 0
        their_drafted = sum(done.draft_n for done in self.theirs)
        their_accepted = sum(done.draft_n_accepted for done in self.theirs)
        ours = [done.rate for done in self.ours]
        each = ", ".join(_median(ours, [done.rate for done in answers]) for answers in self.builds.values())
        return [self.name, own, each, seen, f"{drafted} / {their_drafted}", f"{accepted} / {their_accepted}"]


def _median(ours: list[float], theirs: list[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.3f}×"


def server(setup: Setup) -> Section:
    """llama-server with `--spec-type draft-simple`: prompt as token ids, greedy, nothing reused, the same threads."""
    alphas = ALPHAS[:1] if setup.quick else ALPHAS
    depths = (3,) if setup.quick else DEPTHS
    n = 33 if setup.quick else N_TOKENS
    pairs = []
    for alpha in alphas:
        wanted = (0, *depths) if alpha == alphas[0] else depths
        pairs += [_measure(setup, alpha, depth, setup.choose(3), n) for depth in wanted]
    drafted = [pair for pair in pairs if pair.depth]
    section = Section(tables=[Table("same pair, same depth", HEADS, [pair.line() for pair in pairs])])
    section.rows = [Row(pair.name, "tok/s", *pair.rates()) for pair in pairs]
    # Rates of different pairs: only the ratios of this row mean anything.
    ours, theirs = ([rate for pair in drafted for rate in pair.rates()[side]] for side in (0, 1))
    section.rows.append(Row("all of them with a draft", "tok/s", ours, theirs, FASTER))
    seen = [[rate for pair in drafted for rate in pair.seen()[side]] for side in (0, 1)]
    section.rows.append(Row("the same, as the client sees it", "tok/s", seen[0], seen[1], FASTER))
    answers = sum(3 * len(pair.ours) for pair in pairs)
    section.remarks = [
        "the faster of llama-server's two builds counts, pair by pair",
        f"{sum(pair.wrong for pair in pairs)} of {answers} answers are not, to the letter, what the target is known "
        "to say",
        "own clocks: from the first to the last token by the worker's and by the server's figures; the client's: "
        "tokens by the time from the request to the end, the prompt of 32 tokens read anew by both",
    ]
    section.data = {
        pair.name: {
            "ours": pair.rates()[0],
            "without_openmp": [done.rate for done in pair.builds[False]],
            "with_openmp": [done.rate for done in pair.builds[True]],
            "seen": pair.seen(),
        }
        for pair in pairs
    }
    return section


def _measure(setup: Setup, alpha: float, depth: int, rounds: int, n: int) -> _Pair:
    shapes, pair = setup.shapes, _Pair(alpha, depth)
    target, draft = shapes.target_file(QUANTIZATION), shapes.draft_file(alpha)
    texts = typical_texts(shapes.n_vocab, alpha, n, rounds + 1, [depth or 1])
    warm_up, texts = texts[-1], texts[:-1]
    say(pair.name)
    with (
        tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder,
        workers(setup.threads) as loaded,
        _server(setup, target, draft if depth else None, depth, Path(folder), openmp=False) as plain,
        _server(setup, target, draft if depth else None, depth, Path(folder), openmp=True) as openmp,
    ):
        side = Side(loaded.load(target, draft, n_ctx=N_CTX, calibrate=False), fixed(depth) if depth else PLAIN)

        def ours() -> float:
            text = texts[len(pair.ours)]
            done = loaded.run(answer(side.backend, text.prompt_text, n, speculation=side.speculation))
            pair.ours.append(done)
            pair.wrong += done.text != text.future_text
            if depth and figures(done).passes != known(text, depth).passes:
                say(f"  {figures(done).passes} passes instead of {known(text, depth).passes}")
            return done.rate

        def theirs(baseline: LlamaServer, done_before: list[Completion]) -> float:
            text = texts[len(done_before)]
            done = baseline.complete_tokens(text.prompt, n)
            done_before.append(done)
            pair.wrong += done.text != text.future_text
            return done.rate

        loaded.run(answer(side.backend, warm_up.prompt_text, 17, speculation=side.speculation))
        plain.complete_tokens(warm_up.prompt, 17)
        openmp.complete_tokens(warm_up.prompt, 17)
        sides = {
            "llama-server": lambda: theirs(plain, pair.builds[False]),
            "llama-server, OpenMP": lambda: theirs(openmp, pair.builds[True]),
            "cpuchat": ours,
        }
        alternate(rounds, sides)
    return pair


def _server(
    setup: Setup, target: Path, draft: Path | None, depth: int, folder: Path, *, openmp: bool
) -> AbstractContextManager[LlamaServer]:
    log = folder / f"server-{'openmp' if openmp else 'plain'}.log"
    return llama_server(target, threads=setup.threads, n_ctx=N_CTX, log=log, draft=draft, depth=depth, openmp=openmp)
