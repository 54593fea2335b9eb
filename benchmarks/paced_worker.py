"""A worker process that computes nothing and writes Markdown at a given pace: what the app costs, it costs with this.

    python benchmarks/paced_worker.py ROOT RATE

Speaks the protocol of the cpuchat in `ROOT` over stdin and stdout, `RATE` tokens per second. Used by `ui.py`.
"""

from __future__ import annotations

import re
import sys
import threading
import time

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])

from cpuchat.protocol import messages, model_info
from cpuchat.protocol.timings import DrafterCount, SpeculationFigures, Timings

PROSE = (
    "Reading the prompt is a **matrix × matrix** product: each weight is fetched once and used for *every* token. "
    "Writing is `matrix × vector`, so every weight is fetched again for each token and the memory sets the pace. "
)
DOCUMENT = (
    "## How fast could it be?\n\n"
    + PROSE * 2
    + "\n\n1. Measure the **read bandwidth** of the machine.\n2. Divide it by the bytes per token.\n"
    "   - weights, without the embedding table\n   - the part of the KV cache that is in use\n3. Compare.\n\n"
    "```python\ndef ceiling(bandwidth: float, bytes_per_token: float) -> float:\n"
    '    """Tokens per second if nothing but memory counted."""\n    if bytes_per_token <= 0:\n'
    "        raise ValueError('no model')\n    return bandwidth / bytes_per_token  # no draft\n\n"
    "for name, size in {'Q8_0': 1.65e9, 'Q4_K_M': 0.99e9}.items():\n    print(name, ceiling(51e9, size))\n```\n\n"
    "| quantization | bytes per token | ceiling |\n|:--|--:|--:|\n| Q8_0 | 1.65 GB | 30.9 tok/s |\n"
    "| Q4_K_M | 0.99 GB | 51.5 tok/s |\n| F16 | 3.09 GB | 16.5 tok/s |\n\n> A draft model moves the ceiling.\n\n"
    + PROSE
)
UPDATE_SECONDS = 0.25  # between two updates of the drafting figures, as of the engine


def tokens(count: int) -> list[str]:
    """`count` pieces of Markdown of about four characters each."""
    pieces = re.findall(r"\s*\w{1,6}|\s*[^\w\s]{1,3}|\s+", DOCUMENT + "\n\n")
    return [pieces[index % len(pieces)] for index in range(count)]


def emit(event: messages.Event) -> None:
    sys.stdout.buffer.write(messages.encode(event))
    sys.stdout.buffer.flush()


def loaded(command: messages.LoadModel) -> messages.ModelLoaded:
    return messages.ModelLoaded(
        model=model_info.ModelInfo(
            path=command.path, name="Paced-1.5B-Instruct", architecture="qwen2", quantization="Q8_0",
            n_params=1_543_714_304, size=1_646_572_928, n_ctx=32768, n_ctx_train=32768, n_vocab=151_936, n_layer=28,
            n_threads=len(command.cpus), cpus=command.cpus, peak_read=78e9, cache_bytes=32 << 20,
            pass_ms=tuple(39.7 + 6.0 * n for n in range(32)),
            work=model_info.ModelWork(
                n_layer=28,
                dense=(model_info.Weights("Q8_0", 1_646_572_928, 1_543_714_304),),
                attention=(model_info.Attention(28_672, 86_016),),
            ),
        )
    )  # fmt: skip


def drafting(n: int, rate: float) -> SpeculationFigures:
    """Figures of suffix decoding that change as they do in an answer."""
    passes, drafted = max(1, n * 2 // 3), n // 2
    return SpeculationFigures(
        passes=passes,
        draft_n=drafted,
        draft_n_accepted=drafted * 2 // 3,
        by_position=((drafted, drafted * 3 // 4), (drafted // 2, drafted // 4)),
        by_drafter=(DrafterCount(name="suffix", draft_n=drafted, draft_n_accepted=drafted * 2 // 3),),
        drafter="suffix",
        depth=3 + n // 40 % 3,
        plain_ms=1.2e3 / rate,
    )


def answer(request: messages.Generate, rate: float, cancelled: threading.Event) -> None:
    """Write until cancelled."""
    every = request.output.frame_seconds
    pieces = tokens(10_000)
    emit(messages.PrefillProgress(request_id=request.request_id, processed=10_000, total=10_000, cache_n=9_900))
    began, told, sent = time.perf_counter(), 0.0, 0
    while not cancelled.wait(every):
        now = time.perf_counter() - began
        due = int(now * rate)
        if due > sent:
            text = "".join(pieces[number % len(pieces)] for number in range(sent, due))
            sent, count = due, due - sent
            emit(
                messages.TextDelta(
                    request_id=request.request_id, text=text, n_tokens=count, lengths=(len(text),),
                    predicted_n=sent, at_ms=1e3 * now,
                )
            )  # fmt: skip
        if request.speculation.drafters and now >= told + UPDATE_SECONDS:
            told = now
            figures = drafting(sent, rate)
            emit(messages.SpeculationUpdate(request_id=request.request_id, predicted_n=sent, figures=figures))
    timings = Timings(predicted_n=sent, predicted_ms=1e3 * (time.perf_counter() - began), n_past=10_000 + sent)
    emit(messages.GenerationFinished(request_id=request.request_id, stop_reason="cancelled", timings=timings))


def main() -> None:
    rate = float(sys.argv[2])
    emit(messages.WorkerReady(engine=model_info.EngineInfo(version="paced")))
    stdin, cancelled = sys.stdin.buffer, threading.Event()
    while header := stdin.read(messages.HEADER_SIZE):
        match command := messages.decode_command(stdin.read(messages.frame_length(header))):
            case messages.LoadModel():
                emit(loaded(command))
            case messages.Generate():
                cancelled.clear()
                threading.Thread(target=answer, args=(command, rate, cancelled), daemon=True).start()
            case messages.Cancel():
                cancelled.set()
            case messages.Shutdown():
                emit(messages.ShuttingDown())
                return
            case _:
                pass


if __name__ == "__main__":
    main()
