"""How much of a chat is evaluated again: cpuchat and llama-server with models whose state cannot be cut anywhere.

    python benchmarks/states.py [--quick] [--rounds N] [--only reuse,decode,histories] [--archs qwen35,lfm2,...]

reuse: chats of about 4,000 tokens of small models with recurrent states (qwen35, lfm2, nemotron_h, mamba), sliding
windows (gemma3) and plain attention (llama), by `cpuchat serve` and by llama-server with its checkpoints and prompt
cache: regenerate, a new message after Esc, the same message after Esc in its prefill, an edit of the end of the last
message, a template that leaves out earlier reasoning, a branch from two turns ago and the return from it, another
system prompt. Tokens evaluated by both; tokens that no earlier request had (plus 64: our limit); time to the first.

decode: tok/s with states kept against `saved_kv_gb = 0`, of a hybrid and of a model with sliding windows.

histories: random chats (sent, stopped, edited, regenerated, branched, continued after a restart and after SIGKILL);
each answer against that of an engine that evaluates the whole prompt anew. Where they differ, the logits of the two
tokens say whether it is rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from baselines import llama_server
from common import Row, Target, alternate, arguments, machine, report, run_main, say, table
from product import default_threads
from serve import complete, our_server

sys.path.insert(0, str(Path(__file__).parents[1]))

from state_chats import LETTERS, SCENARIOS, TEMPLATE, Chat, Client, Figures, Measured
from state_histories import ARCHITECTURES as OF_HISTORIES
from state_histories import histories

from tests.support.tiny_gguf import Architecture, write_tiny_gguf

PARTS = ("reuse", "decode", "histories")
ARCHITECTURES: tuple[Architecture, ...] = ("qwen35", "lfm2", "nemotron_h", "gemma3", "llama", "mamba")
N_CTX, WINDOW = 8192, 512
MARGIN = 64
"""Tokens that may be evaluated beside those that changed."""
HISTORIES = 40
"""Of each architecture."""


def _model(folder: Path, arch: Architecture, n_embd: int, n_layer: int, delta: tuple[int, int]) -> Path:
    return write_tiny_gguf(
        folder / f"{arch}-{n_embd}x{n_layer}.gguf",
        arch=arch,
        template=TEMPLATE,
        n_ctx_train=N_CTX,
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_embd // 64,
        n_ff=2 * n_embd,
        likely=LETTERS,
        window=WINDOW,
        delta=delta,
    )


@contextlib.contextmanager
def _both(file: Path, folder: Path, threads: int) -> Iterator[dict[str, Client]]:
    """Run both servers of one file; yields clients of them."""
    options = ("--threads", str(threads), "--ctx", str(N_CTX), "--drafters", "off")
    log = folder / "llama.log"
    with (
        our_server(file, *options, folder=folder / file.stem) as (url, _),
        llama_server(file, threads=threads, n_ctx=N_CTX, log=log, extra=("--jinja",)) as theirs,
        contextlib.closing(Client(url)) as ours,
        contextlib.closing(Client(theirs.url)) as other,
    ):
        yield {"cpuchat": ours, "llama-server": other}


def reuse(arch: Architecture, threads: int, rounds: int, scenarios: int | None) -> list[Row]:
    """Every round of a scenario has a chat of its own, with each server."""
    found: dict[str, tuple[list[Measured], list[Measured]]] = {}
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as name:
        folder = Path(name)
        file = _model(folder, arch, 384, 6, (6, 64))
        with _both(file, folder, threads) as clients:
            for client in clients.values():  # warm up: not counted
                _play(SCENARIOS[0], client, clients["llama-server"], iter(["warm up"]))
            for scenario in SCENARIOS[:scenarios]:
                runs = alternate(rounds, _sides(scenario, clients))
                for what in runs["cpuchat"][0]:
                    ours, theirs = ([one[what] for one in runs[side]] for side in ("cpuchat", "llama-server"))
                    found[what] = ours, theirs
    _print_reuse(arch, found)
    return [row for what, (ours, theirs) in found.items() for row in _reuse_rows(f"{arch}, {what}", ours, theirs)]


def _sides(scenario: Callable[[Chat], Figures], clients: dict[str, Client]) -> dict[str, Callable[[], Figures]]:
    tokenizer = clients["llama-server"]

    def side(client: Client) -> Callable[[], Figures]:
        salts = (f"{scenario.__name__} {number}" for number in range(1_000_000))
        return partial(_play, scenario, client, tokenizer, salts)

    return {name: side(client) for name, client in clients.items()}


def _play(scenario: Callable[[Chat], Figures], client: Client, tokenizer: Client, salts: Iterator[str]) -> Figures:
    return scenario(Chat(client, tokenizer, next(salts)))


def _reuse_rows(what: str, ours: list[Measured], theirs: list[Measured]) -> list[Row]:
    at_most_theirs, tokens = Target(1.0, False), [max(one.evaluated, 1) for one in theirs]
    limits = [one.evaluated / (one.changed + MARGIN) for one in ours]
    note = f"{_range([one.changed for one in ours])} of {_range([one.prompt for one in ours])} tokens changed"
    return [
        Row(f"{what}: evaluated", "tokens", [one.evaluated for one in ours], tokens, at_most_theirs, note),
        Row(f"{what}: evaluated ÷ (changed + {MARGIN})", "×", limits, target=at_most_theirs),
        Row(f"{what}: first token", "ms", [o.first_ms for o in ours], [t.first_ms for t in theirs], Target(1.1, False)),
    ]


def _print_reuse(arch: str, found: dict[str, tuple[list[Measured], list[Measured]]]) -> None:
    """Print what the rows hold, in one line for each scenario."""
    lines = []
    for what, (ours, theirs) in found.items():
        first = Row("", "ms", [one.first_ms for one in ours], [one.first_ms for one in theirs])
        cells = [[getattr(one, name) for one in ours] for name in ("prompt", "changed", "evaluated")]
        columns = [*map(_range, cells), _range([one.evaluated for one in theirs])]
        lines.append([f"{arch}, {what}", *columns, *first.cells()[1:4]])
    heads = ("scenario", "prompt", "changed", "cpuchat", "llama-server", "first token", "llama-server", "ratio")
    print(f"\n{table(lines, heads)}", flush=True)


def _range(counts: list[int]) -> str:
    return str(counts[0]) if min(counts) == max(counts) else f"{min(counts)}–{max(counts)}"


def decode(arch: Architecture, threads: int, rounds: int, tokens: int) -> Row:
    """Decode tok/s of one file with states kept and without."""
    options = ("--threads", str(threads), "--ctx", str(N_CTX), "--drafters", "off")
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as name:
        folder = Path(name)
        file = _model(folder, arch, 1024, 8, (16, 128))
        with (
            our_server(file, *options, folder=folder / "on") as (on, _),
            our_server(file, *options, folder=folder / "off", kept_gb=0.0) as (off, _),
        ):
            numbers = iter(range(1_000_000))

            def side(url: str, n_tokens: int = tokens) -> float:
                client = Client(url)
                prompt = Chat(client, client, str(next(numbers))).words(512, "prompt")
                return complete(url, prompt, n_tokens).predicted_per_second

            for url in (on, off):  # warm up: not counted
                side(url, 8)
            runs = alternate(rounds, {"on": lambda: side(on), "off": lambda: side(off)}, settle=0.5)
    note = "the baseline is cpuchat with saved_kv_gb = 0"
    return Row(f"decode with states kept, {arch}", "tok/s", runs["on"], runs["off"], Target(0.99), note)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts: {','.join(PARTS)}")
    parser.add_argument("--archs", default="", help="architectures (default: those of each part)")
    parser.add_argument("--threads", type=int, default=0, help="for both sides (0: cpuchat's choice)")


def main() -> None:
    options = arguments(__doc__, _options)
    where, parts, quick = machine(), options.only.split(","), options.quick
    threads = options.threads or default_threads()

    def wanted(of_part: tuple[Architecture, ...]) -> list[Architecture]:
        chosen = options.archs.split(",") if options.archs else of_part[: 1 if quick else None]
        return [arch for arch in of_part if arch in chosen]

    rows: list[Row] = []
    if "reuse" in parts:
        for arch in wanted(ARCHITECTURES):
            say(f"reuse, {arch}")
            rows += reuse(arch, threads, options.rounds or (1 if quick else 5), 2 if quick else None)
    if "decode" in parts:
        for arch in wanted(("qwen35", "gemma3")):
            rows.append(decode(arch, threads, options.rounds or (2 if quick else 8), 64 if quick else 256))
    if "histories" in parts:
        rows += histories(wanted(OF_HISTORIES), 3 if quick else HISTORIES)
    report("states", where, rows, quick=quick, remarks=[f"{threads} threads on both sides, no drafts"])


if __name__ == "__main__":
    run_main(main)
