"""A model's own head (MTP): known acceptance, against fixed depths and plain, against llama-server, catching up, texts.

    python benchmarks/heads.py [--quick] [--rounds N] [--depths N] [--threads N] [--only table,texts,...]

A hybrid model of Qwen3.5's architecture, of 0.5 billion parameters in Q8_0, whose head is right about a known share α
of the tokens. The llama-server is built from the source distribution of the installed engine; its depth is its default.
The parts (`--only`) are kept one by one in results/heads.json. `table` is all of them that compare speeds, with 95 %
intervals, in a quarter of an hour on a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from build_llama import libraries
from common import WORK, MeasureError, Row, Target, alternate, run_main, say, spread
from depths import Found, measure_pair, section_of
from drafting import ADAPTIVE, Section, Setup, Table, fixed, workers
from never_slower import EVERYTHING, interval, paired_answers
from pairs import Shapes, Text, text_at, typical_texts, written
from product import PLAIN, answer, worker
from speculation import run_parts

from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.fit import snapshots
from cpuchat.models.gguf.header import read_model
from cpuchat.protocol.messages import LoadOptions
from tests.support.head_model import HybridShape, write_head_model
from tests.support.head_texts import GREEDY, SAMPLED, WEIGHT, compare_texts

ALPHAS = (0.3, 0.6, 0.8, 0.9)
QUANTIZATION = "Q8_0"
HALF_BILLION = HybridShape(
    n_layer=24, n_embd=1024, n_ff=3584, n_vocab=32768, n_head=8, n_head_kv=2, head=256, every=4, n_state_head=16,
    state=128,
)  # fmt: skip
N_TOKENS, N_OF_SERVER, N_REUSED, N_MORE, N_CTX = 65, 49, 4000, 32, 4608
SERVER_DEPTH = 3
TABLE_ROUNDS = 8
POINTS, SERVER, AS_MUCH = Target(2, at_least=False), Target(1.1), Target(1.1, at_least=False)


@dataclass(frozen=True)
class HeadShapes(Shapes):
    """A model as both target and draft."""

    target: str = "0.5b hybrid"
    draft: str = "head"
    hybrid: HybridShape = HALF_BILLION

    def draft_file(self, alpha: float) -> Path:
        name = f"head-{self.hybrid.n_layer}l-{self.n_vocab}-a{round(100 * alpha):03}.gguf"
        write = partial(write_head_model, alpha=alpha, shape=self.hybrid, quant=QUANTIZATION, weight=0.01)
        return written(name, write)


QUICK = HeadShapes(n_vocab=4096, hybrid=HybridShape(n_vocab=4096))


def with_head(setup: Setup, alpha: float, rounds: int = 3) -> tuple[Found, int]:
    """The adaptive depth, plain decoding and fixed depths in turn, and the longest draft."""
    file, most, n = setup.shapes.draft_file(alpha), setup.depths or 3, 33 if setup.quick else N_TOKENS
    longest = snapshots(read_model(file), LoadOptions(draft_path=str(file))) or 31
    more: dict[str, int] = {"rounds": setup.choose(rounds), "most": most, "n": n, "longest": longest}
    with workers(setup.threads) as loaded:
        return measure_pair(loaded, file, QUANTIZATION, setup.shapes, alpha, **more), longest


def known(setup: Setup, alpha: float) -> Section:
    """Acceptance against the share, and the adaptive depth against plain decoding and fixed depths."""
    return known_section(*with_head(setup, alpha), setup)


def known_section(found: Found, longest: int, setup: Setup) -> Section:
    section = section_of([found], found.draft, setup.depths or 3)
    away = 100 * abs(found.acceptance - found.known_acceptance)
    section.rows.insert(0, Row(f"{found.name}: acceptance against the share", "points", [away], target=POINTS))
    section.remarks.append(f"{found.name}: drafts of at most {longest} tokens")
    return section


def best_elsewhere(found: Found) -> list[float]:
    """The rates of the fixed depth that was fastest in all other rounds: the fastest of several by chance would be too
    fast."""

    def elsewhere(rates: Sequence[float], left_out: int) -> float:
        ratios = [a / b for i, (a, b) in enumerate(zip(rates, found.plain, strict=True)) if i != left_out]
        return statistics.median(ratios or [1.0])

    sides = [found.plain, *found.fixed.values()]
    return [max(sides, key=lambda rates, i=i: elsewhere(rates, i))[i] for i in range(len(found.plain))]


def sure(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """`0.98 (0.95 to 1.01)`: the median of the ratios and its 95 % interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def random_head(setup: Setup) -> Section:
    """A head that is always wrong."""
    file = setup.shapes.draft_file(0.0)
    return paired_answers(setup, "random head", file, file, EVERYTHING, sure=Target(0.985))


class Server:
    """A llama-server with one slot, which is asked over HTTP."""

    _open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def __init__(self, file: Path, threads: int, *, with_head: bool) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        program = libraries() / "llama-server"
        options = ["-m", file, "-c", N_CTX, "-np", 1, "-t", threads, "--port", self._url.rpartition(":")[2]]
        options += ["--spec-type", "draft-mtp"] if with_head else []
        self._log = (WORK / "llama-server.log").open("w")
        self.process = subprocess.Popen([program, *map(str, options)], stdout=self._log, stderr=subprocess.STDOUT)
        for _ in range(600):
            with contextlib.suppress(OSError):
                if json.load(self._open(f"{self._url}/health", timeout=5))["status"] == "ok":
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.close()
        raise MeasureError("llama-server did not start: " + Path(self._log.name).read_text()[-300:])

    def ask(self, prompt: str, n: int) -> dict[str, Any]:
        """`timings` of an answer of `n` tokens, and its `content`."""
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/completion", json.dumps(body).encode(), kind)
        return json.load(self._open(request, timeout=600))

    def rate(self, prompt: str, n: int) -> float:
        """tok/s, the first token not counted, as of our own."""
        timings = self.ask(prompt, n)["timings"]
        return 1e3 * (timings["predicted_n"] - 1) / timings["predicted_ms"]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()


@contextlib.contextmanager
def servers(file: Path, threads: int) -> Iterator[tuple[Server, Server]]:
    """One with the head, and one without."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(contextlib.closing(Server(file, threads, with_head=one))) for one in (True, False)]
        yield found[0], found[1]


def against_server(setup: Setup, alpha: float) -> Section:
    """The same head in the same build, at a depth from measured costs and at llama-server's default depth."""
    file, n, rounds = setup.shapes.draft_file(alpha), 33 if setup.quick else N_OF_SERVER, setup.choose(3)
    texts = typical_texts(setup.shapes.n_vocab, alpha, n, rounds + 1, (1, 2, 3))
    with workers(setup.threads) as loaded, servers(file, setup.threads) as (theirs, plain_server):
        backend = loaded.load(file, file)

        def once(run: Callable[[str], float], left: Iterator[Text]) -> float:
            return run(next(left).prompt_text)

        def ours(prompt: str, speculation: Any) -> float:
            return loaded.run(answer(backend, prompt, n, speculation=speculation)).rate

        sides: dict[str, Callable[[str], float]] = {
            "head": lambda prompt: ours(prompt, ADAPTIVE),
            "plain": lambda prompt: ours(prompt, PLAIN),
            "server": lambda prompt: theirs.rate(prompt, n),
            "plain server": lambda prompt: plain_server.rate(prompt, n),
        }
        for run in sides.values():
            run(texts[-1].prompt_text)
        rates = alternate(rounds, {name: partial(once, run, iter(texts)) for name, run in sides.items()})
        last = theirs.ask(texts[0].prompt_text, n)
    wrong = last["content"] != texts[0].future_text

    accepted = f"{last['timings'].get('draft_n_accepted', 0)} of {last['timings'].get('draft_n', 0)}"
    return Section(
        rows=[
            Row(f"α {alpha:g}: head against llama-server's", "tok/s", rates["head"], rates["server"], SERVER),
            Row(f"α {alpha:g}: head against plain", "tok/s", rates["head"], rates["plain"], Target(1.0)),
            Row(f"α {alpha:g}: llama-server's head against its plain", "tok/s", rates["server"], rates["plain server"]),
        ],
        remarks=[f"llama-server, α {alpha:g}: {accepted} drafted tokens accepted{', WRONG TEXT' * wrong}"],
        data={"rates": rates},
    )


async def _caught_up(file: Path, head: str, setup: Setup, prompts: Sequence[str], folder: Path) -> dict[str, float]:
    """Milliseconds of the first prompt, of one that goes on with it, and of both after a restart; MB."""
    spec = PlacementSpec(threads=setup.threads)
    found: dict[str, float] = {}
    drafts = fixed(SERVER_DEPTH) if head else PLAIN
    for name, more in zip(("prompt", "restarted"), prompts[1:], strict=True):
        async with worker(file, LoadOptions(n_ctx=N_CTX, draft_path=head), spec, state_dir=folder) as backend:
            for what, prompt in ((name, prompts[0]), (f"{name}: more", more)):
                done = await answer(backend, prompt, 16, speculation=drafts, chat="chat")
                found[what], found[f"{what}: accepted"] = done.timings.prompt_ms, done.timings.draft_n_accepted
            assert backend.engine is not None
            found["MB"] = psutil.Process(backend.engine.pid).memory_info().rss / 1e6
    return found


def catch_up(setup: Setup) -> Section:
    """What a head costs beside a long prompt: reading it, after it was reused, after a restart, and memory."""
    file, n, n_vocab = setup.shapes.draft_file(0.8), 400 if setup.quick else N_REUSED, setup.shapes.n_vocab
    text = text_at(n_vocab, 0.8, 0, 1, n).prompt_text
    prompts = [text, *(text + text_at(n_vocab, 0.8, start, 1, N_MORE).prompt_text for start in (997, 1994))]
    ours: dict[bool, dict[str, float]] = {}
    for with_head in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            say(f"ours, {'with' if with_head else 'without'} head")
            found = _caught_up(file, str(file) if with_head else "", setup, prompts, Path(folder))
            ours[with_head] = asyncio.run(found)
    theirs: dict[bool, dict[str, float]] = {}
    with servers(file, setup.threads) as both:
        for with_head, server in zip((True, False), both, strict=True):
            say(f"llama-server, {'with' if with_head else 'without'} head")
            first, more = (server.ask(prompt, 16)["timings"]["prompt_ms"] for prompt in prompts[:2])
            resident = psutil.Process(server.process.pid).memory_info().rss / 1e6
            theirs[with_head] = {"prompt": first, "prompt: more": more, "MB": resident}

    def ratio(side: dict[bool, dict[str, float]], key: str) -> list[float]:
        return [side[True][key] / side[False][key]]

    whats = {"prompt": f"prompt of {n} tokens, ms", "prompt: more": f"{N_MORE} tokens after {n} reused, ms",
             "restarted": f"{n} tokens after a restart, ms", "restarted: more": f"{N_MORE} tokens after that, ms",
             "MB": "resident memory, MB"}  # fmt: skip
    lines = [[what, *(f"{side[head][key]:.0f}" if key in side[head] else "–" for side in (ours, theirs)
                      for head in (True, False))] for key, what in whats.items()]  # fmt: skip
    rows = [
        Row(f"{what}: head ÷ plain", "×", ratio(ours, key), ratio(theirs, key), AS_MUCH)
        for key, what in whats.items() if key in theirs[True]
    ]  # fmt: skip
    heads = ("", "ours, head", "ours, plain", "llama-server, head", "llama-server, plain")
    accepted = ", ".join(f"{key.partition(': acc')[0]} {n:.0f}" for key, n in ours[True].items() if "accepted" in key)
    return Section(rows, [Table("catching up", heads, lines)], [f"accepted of 15 tokens: {accepted}"], {"ours": ours})


def texts(setup: Setup) -> Section:
    """Text with the head and without: greedy and sampled, stopped, edited, regenerated, with a grammar, restarted."""
    count, rows, remarks = 10 if setup.quick else setup.rounds or 200, list[Row](), list[str]()
    file = written("head-texts-4.gguf", partial(write_head_model, alpha=0.7, quant=QUANTIZATION, weight=WEIGHT))
    for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(compare_texts(file, Path(folder), range(count), sampling, restart_every=10))
        rows.append(Row(f"{name}: texts that differ", "", [len(found.different)], target=Target(0, at_least=False)))
        remarks.append(
            f"{name}: {found.answers} answers to {count} prompts, {len(found.distinct)} different first ones; "
            f"accepted: {found.accepted}"
        )
        remarks += found.different[:5]
    return Section(rows, remarks=remarks)


TABLE_HEADS = (
    "α", "acceptance: measured / known", "plain, tok/s", "head ÷ plain", "best fixed depth", "head ÷ best fixed depth",
    "head ÷ llama-server's head", "its head ÷ its plain",
)  # fmt: skip


def whole_table(setup: Setup) -> Section:
    """A head that is always wrong, and those of known acceptance: against plain decoding, fixed depths and
    llama-server, with 95 % intervals of the median ratio."""
    lines, sections = list[list[str]](), [random_head(setup)]
    paired = sections[0].tables[0].lines[0]
    for alpha in (0.0, *ALPHAS):
        line = ["random", "–", "–", f"{paired[2]} ({paired[3]})", "plain", "–"]
        if alpha:
            found, longest = with_head(setup, alpha, TABLE_ROUNDS)
            sections.append(known_section(found, longest, setup))
            line = [f"{alpha:g}", f"{found.acceptance:.3f} / {found.known_acceptance:.3f}", spread(found.plain),
                    sure(found.adaptive, found.plain), f"{found.best()[0] or 'plain'}",
                    sure(found.adaptive, best_elsewhere(found))]  # fmt: skip
        sections.append(against_server(setup, alpha))
        rates = sections[-1].data["rates"]
        lines.append([*line, sure(rates["head"], rates["server"]), sure(rates["server"], rates["plain server"])])
    return Section(
        rows=[row for one in sections for row in one.rows],
        tables=[Table("heads of a known acceptance, with 95 % intervals", TABLE_HEADS, lines)],
        remarks=[remark for one in sections for remark in one.remarks],
        data={"parts": [one.data for one in sections]},
    )


PARTS: dict[str, Callable[[Setup], Section]] = {
    **{f"known-{alpha:g}": partial(known, alpha=alpha) for alpha in ALPHAS},
    "random": random_head,
    **{f"server-{alpha:g}": partial(against_server, alpha=alpha) for alpha in ALPHAS},
    "catch-up": catch_up,
    "texts": texts,
    "table": whole_table,
}

if __name__ == "__main__":
    run_main(lambda: run_parts("heads", __doc__, PARTS, HeadShapes(), QUICK))
