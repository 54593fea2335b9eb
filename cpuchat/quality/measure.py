"""Measures the quality loss of models against a base model, in a separate process; can be stopped and resumed, as each
measured window is kept (`measure.store`)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec
import numpy as np

from cpuchat.base.errors import MeasureFailed, UsageError, VocabularyMismatch
from cpuchat.base.line_process import LineProcess
from cpuchat.base.processes import python_command
from cpuchat.hardware.numa.mempolicy import launch_command
from cpuchat.hardware.placement.placement import Placement
from cpuchat.measure import store
from cpuchat.measure.subject import Subject
from cpuchat.models.file_names import file_fingerprint
from cpuchat.models.gguf.header import GGUFHeader, read_model, vocabulary
from cpuchat.models.ollama import file_name
from cpuchat.quality.messages import Answer, Disagreement, Loading, Planned, QualityFinished, QualityStart, Scored, Text
from cpuchat.quality.statistics import Scores, Summary, indistinguishable, summarize
from cpuchat.quality.texts import builtin_texts

_KEPT = "window of a quality measurement"
N_CTX = 512
"""Tokens of a window, llama-perplexity's default."""
WORST = 10


@dataclass
class QualityLoss:
    """Figures of one other model, by window."""

    path: Path
    header: GGUFHeader
    windows: dict[int, Scored] = field(default_factory=dict)

    def summary(self, windows: Iterable[int] | None = None) -> Summary | None:
        """Summarize all measured windows, or those of `windows`; None when there is none."""
        wanted = self.windows if windows is None else [number for number in windows if number in self.windows]
        return summarize([scores_of(self.windows[number]) for number in wanted]) if wanted else None

    def is_like(self, other: QualityLoss) -> bool:
        """Return whether the windows that both have do not tell this file from `other`."""
        both = [number for number in self.windows if number in other.windows]
        return indistinguishable(*([scores_of(one.windows[number]) for number in both] for one in (self, other)))

    @property
    def worst(self) -> list[Disagreement]:
        """The disagreements with the highest KLD, the highest first."""
        found = [one for window in self.windows.values() for one in window.worst]
        return sorted(found, key=lambda one: -one.kld)[:WORST]


@dataclass
class QualityProgress:
    """How far a measurement is. `kinds` of all windows, in order; () until the models are loaded. `loading` names the
    model that is being loaded, `share` (0-1) of it."""

    kinds: tuple[str, ...] = ()
    loading: str = ""
    share: float = 0.0
    done: int = 0
    total: int = 0
    seconds_left: float | None = None


class QualityMeasurement:
    """Compares each of `others` with `base`, over `texts` (default: the built-in ones), from what earlier runs measured
    on. `comparisons` grows while `run` runs, also a cancelled one. Raises UsageError: no model to compare with;
    ModelNotFound, ModelDamaged: a model cannot be read; VocabularyMismatch: one has other tokens than the base."""

    def __init__(self, base: Path, others: Sequence[Path], texts: Sequence[Text] = (), *, n_ctx: int = N_CTX) -> None:
        if not others:
            raise UsageError("No model to compare with.", "Name at least two: the base and another one.")
        self.base = base
        self.header = read_model(base)
        self.n_ctx = n_ctx
        self.comparisons = [QualityLoss(path, read_model(path)) for path in others]
        for comparison in self.comparisons:
            require_same_vocabulary(self.header, comparison.header)
        self.progress = QualityProgress()
        self._texts = tuple(texts) or builtin_texts()
        digest = hashlib.blake2b(msgspec.json.encode(self._texts), digest_size=16).hexdigest()
        engine = metadata.version("llama-cpp-python")  # others give other logits
        self._on = Subject(build=engine, settings={"n_ctx": n_ctx, "texts": digest})
        fingerprint = file_fingerprint(base)
        self._pairs = [(fingerprint, file_fingerprint(path)) for path in others]
        for one in store.find_all(_KEPT, Scored):
            for pair, comparison in zip(self._pairs, self.comparisons, strict=True):
                if one.subject == self._subject(pair, one.value.window):
                    comparison.windows[one.value.window] = one.value

    def _subject(self, pair: tuple[str, str], window: int) -> Subject:
        return msgspec.structs.replace(self._on, model=pair, settings={**self._on.settings, "window": window})

    async def run(self, placement: Placement, tell: Callable[[QualityProgress], None] = lambda _: None) -> None:
        """Measure what is missing. Cancelling keeps every complete window. `tell` is called after each step. Raises
        CpuchatError: as the process, such as DoesNotFit; UsageError: too short a text; MeasureFailed: it ended."""
        start = QualityStart(
            base=str(self.base),
            others=tuple(str(comparison.path) for comparison in self.comparisons),
            cpus=placement.cpus,
            texts=self._texts,
            n_ctx=self.n_ctx,
            done=tuple(tuple(comparison.windows) for comparison in self.comparisons),
        )
        command = launch_command(placement.memory_policy.words, python_command("-m", "cpuchat.engine.lockstep"))
        process = LineProcess[Answer](
            command, "measuring process", Answer, MeasureFailed, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1"
        )
        async with process:
            await process.send(start)
            progress, started, before = self.progress, time.monotonic(), 0
            while True:
                answer = await process.receive()
                match answer:
                    case Loading():
                        progress.loading, progress.share = answer.name, answer.share
                    case Planned():
                        self._plan(answer)
                        started, before = time.monotonic(), progress.done
                    case Scored():
                        self.comparisons[answer.other].windows[answer.window] = answer
                        progress.loading = ""
                        progress.done += 1
                        store.keep(self._subject(self._pairs[answer.other], answer.window), _KEPT, answer)
                        seconds, new = time.monotonic() - started, progress.done - before
                        progress.seconds_left = seconds / new * (progress.total - progress.done)
                    case QualityFinished():
                        tell(progress)
                        return
                tell(progress)

    def _plan(self, planned: Planned) -> None:
        progress, wanted = self.progress, set(range(len(planned.kinds)))
        for comparison in self.comparisons:
            for number in set(comparison.windows) - wanted:
                del comparison.windows[number]
        progress.kinds, progress.loading = planned.kinds, ""
        progress.total = len(planned.kinds) * len(self.comparisons)
        progress.done = sum(len(comparison.windows) for comparison in self.comparisons)

    def by_kind(self, comparison: QualityLoss) -> list[tuple[str, Summary]]:
        """Summarize each kind of text by itself."""
        kinds = self.progress.kinds
        numbers = {kind: [i for i, one in enumerate(kinds) if one == kind] for kind in dict.fromkeys(kinds)}
        found = [(kind, comparison.summary(windows)) for kind, windows in numbers.items()]
        return [(kind, summary) for kind, summary in found if summary is not None]


def require_same_vocabulary(base: GGUFHeader, other: GGUFHeader) -> None:
    """Raises VocabularyMismatch with the first difference, when a token id does not mean the same in both."""
    ours, theirs = vocabulary(base), vocabulary(other)
    reason = ""
    if ours.kind != theirs.kind:
        reason = f"the tokenizers differ ({ours.model} and {theirs.model})"
    elif base.n_vocab != other.n_vocab:
        reason = f"the vocabularies have {base.n_vocab:,} and {other.n_vocab:,} tokens"
    elif ours.tokens is not None and theirs.tokens is not None and not ours.tokens.shares_strings(theirs.tokens, 0):
        first, second = ours.tokens[:], theirs.tokens[:]
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        reason = f"token {at} differs" if at is not None else ""
    if reason:
        raise VocabularyMismatch(
            f"{file_name(other.path)} cannot be measured against {file_name(base.path)} token by token: {reason}.",
            "Choose two quantizations of the same model. `cpuchat compare` works with any two models.",
        )


def scores_of(window: Scored) -> Scores:
    """Return the arrays of a window."""
    return Scores(*(np.frombuffer(getattr(window, name), "<f4") for name in Scores.__struct_fields__))
