"""Records acceptance traces for `benchmarks/simulate.py`: whether a draft model says what real models wrote,
token by token, and real texts as token ids, which suffix decoding drafts in the simulation itself. Nothing is timed.

From the project's root: .venv/bin/python benchmarks/record_traces.py TARGET.gguf DRAFT.gguf
(recorded: Gemma 3 270M Q4_K_M, drafted by a Q2_K that `cpuchat models quantize` made of it, and the demo pair)
"""

from __future__ import annotations

import argparse
import json
import re
from itertools import pairwise
from pathlib import Path

from cpuchat.base import paths
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import LoadOptions

FILE = Path(__file__).parent / "traces.json"
TEXTS = Path("cpuchat/quality/texts")
N_PROMPT, N_ANSWER = 96, 257
DEMO_PROMPTS = (
    "A draft model is", "The cache of a processor", "Memory bandwidth limits", "Once upon a time",
    "To install it, type",
    "def main():",
)  # fmt: skip


def load(file: Path) -> Model:
    options = LoadOptions(n_ctx=1024, n_batch=256, n_ubatch=256)
    return Model.load(file, options, own_cpus()[-1:], on_progress=lambda *_: None, abort=AbortFlag())


def write(target: Model, prompt: list[int], n: int) -> list[int]:
    """Return what the target writes, greedily."""
    sequence, answer = target.sequence, []
    sequence.clear()
    sequence.extend(prompt, n_outputs=1)
    row = sequence.logits(len(prompt) - 1)
    while len(answer) < n:
        answer.append(int(row.argmax()))
        if target.vocab.is_eog(answer[-1]):
            break
        row = sequence.step(answer[-1])
    return answer


def score(draft: Model, prompt: list[int], answer: list[int]) -> str:
    """Return a 1 for each token of the answer after the first that the draft model says too, a 0 for each other."""
    sequence, said = draft.sequence, []
    sequence.clear()
    sequence.extend(prompt)
    for token, following in pairwise(answer):
        said.append("1" if int(sequence.step(token).argmax()) == following else "0")
    return "".join(said)


def tokens(model: Model, text: str) -> list[int]:
    return model.vocab.tokenize(text.encode(), add_special=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    options = parser.parse_args()
    demo, demo_draft = (load(paths.demo_dir() / DEMO_FILES[name]) for name in ("demo", "demo-draft"))
    traces: dict[str, list[str]] = {"demo pair": []}
    for text in DEMO_PROMPTS:
        prompt = tokens(demo, text)
        traces["demo pair"].append(score(demo_draft, prompt, write(demo, prompt, N_ANSWER)))
    target, draft = load(options.target), load(options.draft)
    texts: dict[str, dict[str, list[int]]] = {}
    dialogue = [json.loads(line)["messages"] for line in (TEXTS / "dialogue.jsonl").read_text().splitlines()]
    sources = {
        "code": (TEXTS / "code.txt").read_text(),
        "prose": (TEXTS / "prose.txt").read_text(),
        "dialogue": "\n\n".join(f"{one['role']}: {one['content']}" for chat in dialogue for one in chat),
    }
    for name, source in sources.items():
        ids = tokens(target, source)
        written, given = (
            traces.setdefault(f"{name}, written by the model", []),
            traces.setdefault(f"{name}, real text", []),
        )
        print(name, flush=True)
        for i in range(4):
            part = ids[i * len(ids) // 4 :]
            prompt = part[:N_PROMPT]
            written.append(score(draft, prompt, write(target, prompt, N_ANSWER)))
            given.append(score(draft, prompt, part[N_PROMPT : N_PROMPT + N_ANSWER]))
        texts[name] = {"prompt": ids[:600], "answer": ids[600 : 600 + 2 * N_ANSWER]}
    code = sources["code"][:2400]
    renamed = re.sub(r"\bstart\b", "first", re.sub(r"\b_stops\b", "_ends", code))
    texts["rename in code"] = {"prompt": tokens(target, code), "answer": tokens(target, renamed)}
    quoted = sources["prose"][:3000]
    sentences = re.split(r"(?<=[.!?])\s+", quoted)
    summary = " ".join(
        f'It says: "{one}"' if i % 2 else "This is then explained at some length." for i, one in enumerate(sentences)
    )
    texts["quotations"] = {"prompt": tokens(target, quoted), "answer": tokens(target, summary)[: 2 * N_ANSWER]}
    FILE.write_text(json.dumps({"draft": traces, "texts": texts}, separators=(",", ":")) + "\n")
    for name, answers in traces.items():
        print(name, [round(one.count("1") / max(1, len(one)), 2) for one in answers])


if __name__ == "__main__":
    main()
