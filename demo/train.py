"""From the corpus to the three GGUF files: python demo/train.py [--minutes N] [--out DIR].

Takes up a run that was stopped. Needs requirements.txt; quantizing and judging are left to the project's own
environment (--engine-python), which has llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # trainer.Crew spreads the work
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Type

from demo import tokenizer as vocabulary
from demo.corpus import Topic, answer_texts, load_topics
from demo.data import Batch, Sampler
from demo.export import DRAFT_CARD, TARGET_CARD, write_gguf
from demo.judge import load_keys
from demo.model import DRAFT, TARGET, Model, Shape
from demo.phrases import FOLLOW_UPS, NO_MORE, NOTHING_YET, SYSTEM_PROMPTS
from demo.phrasing import load_parts, variants
from demo.trainer import Crew, Optimizer, device, fit, precision

ROOT = Path(__file__).resolve().parent.parent
TARGET_NAME = "cpuchat-demo-8m"
DRAFT_NAME = "cpuchat-demo-draft-1m"
# Per piece of a step: (from which progress on, rows, tokens per row, share of rows that are one long chat). Rows grow,
# so that far positions are known in the end.
PHASES = ((0.0, 4, 256, 0.0), (0.5, 2, 512, 0.4), (0.75, 1, 1024, 0.7), (0.95, 1, 1600, 0.8))
DRAFT_SHARE = 0.15
DRAFT_ALONE = 0.5
"""Up to here the draft learns from the text alone: three times the steps, since the target need not run."""
ODD_TEXT = "x = 12*(3+45)  # sum\n\n\tindented  é ß 漢 🙂"
ROLES = ("user\n", "assistant\n", "system\n")


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S "), text, flush=True)


def draw(sampler: Sampler, progress: float, where: torch.device) -> Batch:
    """A batch of the phase that `progress` (0 to 1) is in."""
    _, rows, tokens, long_share = [phase for phase in PHASES if progress >= phase[0]][-1]
    return sampler.batch(rows, tokens, long_share).to(where)


def beginnings(model: Model, sampler: Sampler, topics: list[Topic], tokens: int = 8) -> str:
    """How many held-back questions get an answer that begins like one of their topic. For the log only."""
    keys = load_keys()
    prompts = [sampler.prompt([("user", key.text)]) for key in keys]
    lengths = torch.tensor([len(p) for p in prompts])
    where = next(model.parameters()).device
    ids = torch.zeros(len(prompts), int(lengths.max()) + tokens, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    every = torch.arange(len(prompts))
    with torch.no_grad(), precision(where):
        for i in range(tokens):
            hidden = model.hidden(ids.to(where)).cpu()
            last = hidden[every, lengths - 1 + i].to(where)
            ids[every, lengths + i] = model.logits(last).argmax(-1).cpu()
    hits = 0
    for key, row, length in zip(keys, ids.tolist(), lengths.tolist(), strict=True):
        begin = row[length : length + tokens]
        answers = [a for topic in topics if topic.name == key.topic for a in topic.answers]
        hits += any(sampler.answer(a)[: len(begin)] == begin for a in answers)
    return f"held-back beginnings {hits}/{len(keys)}"


def train_one(
    shape: Shape, teacher: Model | None, sampler: Sampler, minutes: float, checkpoint: Path, crew: Crew
) -> tuple[Model, float]:
    """A model of `shape`: trained on the corpus and then, with a `teacher`, on that model's own distribution."""
    where = device()
    torch.manual_seed(1)
    model = Model(shape).to(where)
    rates = (0.003, 0.003) if teacher is None else (0.006, 0.006)
    optimizer = Optimizer(model, *rates, crew)
    say(f"{checkpoint.stem}: {model.size():,} parameters, {minutes:.1f} min on {where.type}")

    lock = threading.Lock()

    def loss_of(progress: float) -> tuple[torch.Tensor, int]:
        with lock:
            batch = draw(sampler, progress, where)
        with precision(where):
            hidden = model.hidden(batch.rows, batch.mask, batch.keep if teacher is None else None)
            logits = model.logits(hidden.flatten(0, 1)[batch.index]).float()
            if teacher is None or progress < DRAFT_ALONE:
                return F.cross_entropy(logits, batch.target, reduction="sum"), len(batch.target)
            with torch.no_grad():
                seen = teacher.hidden(batch.rows, batch.mask).flatten(0, 1)[batch.index]
                wanted = teacher.logits(seen).float().log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="sum"), len(batch.target)

    state = {"get": sampler.rng.getstate, "set": sampler.rng.setstate}
    spent = fit(
        model, optimizer, loss_of, minutes, checkpoint, state,
        lambda: beginnings(model, sampler, sampler.topics), say,
    )  # fmt: skip
    return model, spent


def write_checks(model: Model, sampler: Sampler, folder: Path) -> None:
    """What llama.cpp has to reproduce: the ids of all texts, and the logits of one chat."""
    topics = sampler.topics
    texts = [q for topic in topics for q in topic.questions] + answer_texts(topics) + [k.text for k in load_keys()]
    texts += [f"user\n{text}" for text in (*FOLLOW_UPS, *SYSTEM_PROMPTS, ODD_TEXT)]
    pairs = [[text, sampler.encode(text)] for text in texts]
    (folder / "tokens.json").write_text(json.dumps(pairs), encoding="utf-8")
    ids = sampler.prompt([("system", SYSTEM_PROMPTS[0]), ("user", topics[0].questions[0])])
    with torch.no_grad():
        logits = model.float().cpu()(torch.tensor([ids]))[0]
    np.savez(folder / "logits.npz", ids=np.array(ids), logits=logits.numpy())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=50.0, help="training time of both models together")
    parser.add_argument("--out", type=Path, default=ROOT / "cpuchat" / "models" / "demo")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "cpuchat-demo", help="checkpoints")
    parser.add_argument("--engine-python", default=str(ROOT / ".venv" / "bin" / "python"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    crew = Crew(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)

    topics, parts = load_topics(), load_parts()
    path = args.work / "tokenizer.json"
    answers = [*answer_texts(topics), NO_MORE, NOTHING_YET]
    if not path.exists():
        questions = [q for topic in topics for q in topic.questions]
        # Whole answers often, questions once: words of answers become single tokens first.
        questions += [q.lower() for q in questions]
        questions += [text for entry in parts.values() for part in entry.all() for text in variants(part)]
        vocabulary.train([*questions, *FOLLOW_UPS, *answers * 8, *ROLES * 99], path)
    tokenizer = vocabulary.load(path)
    say(f"{len(topics)} topics, {sum(len(t.questions) for t in topics)} questions, {len(answers)} answers")

    minutes = args.minutes * (1 - DRAFT_SHARE)
    target, target_min = train_one(
        TARGET, None, Sampler(topics, parts, tokenizer, args.seed), minutes, args.work / "target.pt", crew
    )
    minutes = args.minutes * DRAFT_SHARE
    draft, draft_min = train_one(
        DRAFT, target, Sampler(topics, parts, tokenizer, args.seed + 1), minutes, args.work / "draft.pt", crew
    )
    say(f"trained: target {target_min:.1f} min, draft {draft_min:.1f} min")

    write_checks(target, Sampler(topics, parts, tokenizer, 0), args.work)
    exact = args.work / f"{TARGET_NAME}-f32.gguf"
    q8, q4 = args.out / f"{TARGET_NAME}-q8_0.gguf", args.out / f"{TARGET_NAME}-q4_k_m.gguf"
    write_gguf(target, tokenizer, TARGET_CARD, exact, Type.F32)
    write_gguf(target, tokenizer, TARGET_CARD, q8, Type.Q8_0)
    write_gguf(draft.cpu(), tokenizer, DRAFT_CARD, args.out / f"{DRAFT_NAME}-q8_0.gguf", Type.Q8_0)
    here = Path(__file__).resolve().parent
    for command in (
        ["quantize.py", exact, q4],
        ["verify.py", exact, args.work],
        ["evaluate.py", "--models", args.out],
    ):
        code = subprocess.run([args.engine_python, here / command[0], *command[1:]], check=False).returncode
        if code:
            say(f"{command[0]} failed with exit code {code}")
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
