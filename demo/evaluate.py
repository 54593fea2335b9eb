"""Judges the demo pair through llama.cpp: python demo/evaluate.py [--models DIR] [--json FILE].

Asks both quantizations the held-back questions (greedy, with the chat template), judges each answer by its written key
(judge.py), lets the draft model guess four tokens per pass for each answer, takes the figures of probes.py, and holds
a chat of four turns. Exits with 1 below 45 of 50 right answers (90 %) or 50 % accepted draft tokens. Runs in the
project's environment.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo import arithmetic, probes
from demo.corpus import Topic, answer_texts, load_topics
from demo.judge import Key, Reference, judge, load_keys
from demo.llama import Engine
from demo.phrases import NO_MORE, NOTHING_YET

ROOT = Path(__file__).resolve().parent.parent
MIN_RIGHT, MIN_ACCEPTANCE = 0.9, 0.5
DEPTH, LIMIT = 4, 160
CHAT = ("hello", "how do I stop an answer?", "tell me more", "and what is memory bandwidth")


@dataclass
class Drafting:
    """Counts of one or more speculative answers."""

    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    passes: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.drafted)


def ask(engine: Engine, *messages: str) -> str:
    """The answer to the last of `messages`, which alternate between user and assistant."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
    return engine.text(engine.greedy(engine.prompt(turns), LIMIT))


def speculate(target: Engine, draft: Engine, prompt: list[int], count: Drafting) -> list[int]:
    """The target's greedy answer, found by checking `DEPTH` drafted tokens per pass; adds to `count`."""
    ids = list(prompt)
    while len(ids) - len(prompt) < LIMIT:
        guess = draft.greedy(ids, DEPTH)
        # After the last known id and after each guess.
        best = target.logits(ids + guess, len(guess) + 1).argmax(-1).tolist()
        good = 0
        while good < len(guess) and guess[good] == best[good] and not target.ends(guess[good]):
            good += 1
        ended = target.ends(best[good])
        # An end token that the draft guessed too counts as accepted; guesses after it were never verified.
        hit_end = ended and good < len(guess) and guess[good] == best[good]
        count.drafted += good + 1 if hit_end else len(guess)
        count.accepted += good + int(hit_end)
        count.passes += 1
        ids += best[: good + 1]
        count.tokens += good + 1
        if ended:
            break
    return ids[len(prompt) :]


def judge_model(engine: Engine, keys: list[Key], reference: Reference) -> int:
    """Asks all `keys`, prints what failed, returns how many passed."""
    passed = 0
    for key in keys:
        answer = ask(engine, key.text)
        verdict = judge(answer, key, reference)
        passed += verdict.passed
        if not verdict.passed:
            why = [f"missing {m}" for m in verdict.missing] + [f"forbidden {f}" for f in verdict.forbidden]
            print(f"  FAILED [{key.topic}] {key.text}\n    {answer}\n    {'; '.join([*why, *verdict.faults])}")
    return passed


def measure(engine: Engine, topics: list[Topic]) -> dict[str, float | list[int]]:
    """The figures of probes.py, printed too."""

    def answer(*messages: str) -> str:
        return ask(engine, *messages)

    blind, questions = probes.blind(answer, topics)
    right, sums = probes.sums(answer)
    turns = probes.long_chats(answer, topics)
    print(f"  unforeseen wordings: {blind} of {questions} on the right topic; sums: {right} of {sums}")
    print(f"  chats on changing topics, fitting answers of {probes.CHATS} by turn: {turns}")
    return {"blind": blind, "blind_questions": questions, "sums": right, "turns": turns}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "cpuchat" / "models" / "demo")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    keys = load_keys()
    topics = load_topics()
    reference = Reference([*answer_texts(topics), NO_MORE, NOTHING_YET, arithmetic.TOO_LARGE])
    draft = Engine(args.models / "cpuchat-demo-draft-1m-q8_0.gguf")
    figures: dict[str, dict[str, float | list[int]]] = {}
    ok = True
    for kind in ("q8_0", "q4_k_m"):
        engine = Engine(args.models / f"cpuchat-demo-8m-{kind}.gguf")
        passed = judge_model(engine, keys, reference)
        extra = measure(engine, topics)
        count, lossless = Drafting(), 0
        for key in keys:
            prompt = engine.prompt([{"role": "user", "content": key.text}])
            lossless += engine.greedy(prompt, LIMIT) == speculate(engine, draft, prompt, count)
        print(
            f"{kind}: {passed} of {len(keys)} held-back answers right and fluent; "
            f"draft acceptance {count.acceptance:.1%} ({count.accepted} of {count.drafted}, depth {DEPTH}), "
            f"{count.tokens / count.passes:.2f} tokens per pass; {lossless} answers the same with and without the draft"
        )
        ok = ok and passed >= MIN_RIGHT * len(keys) and count.acceptance >= MIN_ACCEPTANCE
        figures[kind] = {
            "passed": passed, "questions": len(keys), **extra, "acceptance": round(count.acceptance, 4),
            "tokens_per_pass": round(count.tokens / count.passes, 3),
        }  # fmt: skip
        said: list[str] = []
        for turn in CHAT:
            said += [turn, ask(engine, *said, turn)]
            print(f"  > {turn}\n    {said[-1]}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
