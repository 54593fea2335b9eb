"""Loads a model: file, weights, context, threads, warm-up."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.engine.llama.control_text import special_types
from cpuchat.engine.llama.file_reading import Progress, place_pages, read_ahead, throttled
from cpuchat.engine.llama.load_plan import N_OUTPUTS_MAX, LoadPlan, plan_load
from cpuchat.engine.llama.rollback import has_recurrent_state, request_rollback
from cpuchat.engine.llama.rollback_probe import detect_rollback
from cpuchat.engine.llama.sequence import Aborted, Sequence
from cpuchat.engine.llama.spm_coverage import spm_coverage
from cpuchat.engine.llama.threads import ThreadPool
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.errors import DoesNotFit, GenerationFailed, Interrupted, ModelDamaged, ModelUnsupported
from cpuchat.hardware.disk import read_rate
from cpuchat.hardware.memory import available_bytes
from cpuchat.model_info import ModelInfo
from cpuchat.models.fingerprint import file_fingerprint
from cpuchat.models.from_disk import slowness
from cpuchat.models.gguf.checks import check_header
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.protocol import LoadOptions

_UNSUPPORTED: Final = ("unknown model architecture", "unknown pre-tokenizer", "unknown tokenizer", "unsupported")
_NO_MEMORY: Final = ("failed to allocate", "unable to allocate", "out of memory")


class Model:
    """A loaded model with its context and the one sequence that chats use.

    Made, used and freed on one thread. `load` is the way to get one.

    Attributes:
        pool: the threads that it computes on; its own, unless it was loaded onto those of another model.
    """

    def __init__(self, header: GGUFHeader, plan: LoadPlan, options: LoadOptions, abort: AbortFlag) -> None:
        self.header = header
        self.plan = plan
        self.options = options
        self._abort = abort
        self._model: Any = None
        self._context: Any = None
        self._own_pool: ThreadPool | None = None
        self._notes = list(plan.notes)
        self.pool: ThreadPool
        self.vocab: Vocab
        self.sequence: Sequence
        self.info: ModelInfo

    @classmethod
    def load(
        cls,
        path: Path,
        options: LoadOptions,
        threads: tuple[int, ...] | ThreadPool,
        *,
        on_progress: Progress,
        abort: AbortFlag,
        visible_markers: tuple[str, ...] = (),
        on_header: Callable[[GGUFHeader], None] = lambda _: None,
        available: int | None = None,
        n_outputs: int = N_OUTPUTS_MAX,
    ) -> Model:
        """Load a GGUF file (any part of a split one).

        Args:
            threads: CPUs to start one thread each on, or the threads of another model to compute on, sequentially with
                it; its owner frees them after this model.
            available: bytes of memory that the model may take; None asks the system.
            n_outputs: rows of logits that one batch may ask for; each takes 4 * n_vocab bytes.
            on_header: called before the weights are read, while the calling thread is not pinned yet.

        Raises:
            Interrupted: `abort` was set.
            ModelNotFound, ModelDamaged, ModelUnsupported, DoesNotFit, UsageError: as their names say.
        """
        bindings.start()
        started = perf_counter()
        header = read_model(path)
        available = available_bytes() if available is None else available
        plan = plan_load(header, options, available, n_outputs)
        check_header(header)
        on_header(header)
        model = cls(header, plan, options, abort)
        bindings.log.clear()
        try:
            if plan.from_disk:
                rate = read_rate(header.path)
                model._notes.append(slowness(header, plan.need, available, rate, options.n_experts))
                on_progress("reading", 0, header.file_size)
            elif options.load_mode == "mmap":
                model._notes += place_pages(header)
                read_ahead(header, on_progress, abort)
            with ThreadPoolExecutor(1) as beside:  # llama.cpp loads on this thread, which leaves a core
                facts = beside.submit(
                    lambda: (spm_coverage(header), special_types(header), file_fingerprint(header.path))
                )
                model._load_weights(on_progress)
            coverage, types, fingerprint = facts.result()
            model.vocab = Vocab(model._model, visible_markers, coverage, types)
            model._make_context(threads)
            model._warm_up()
            model._describe(fingerprint, 1e3 * (perf_counter() - started))
        except Aborted:
            model.free()
            raise Interrupted("The load was cancelled.") from None
        except BaseException:
            model.free()
            raise
        return model

    def _load_weights(self, on_progress: Progress) -> None:
        phase = "preparing" if self.options.load_mode == "mmap" else "reading"
        total, on_progress = self.header.file_size, throttled(on_progress)

        def progress(share: float, _: Any) -> bool:
            on_progress(phase, int(share * total), total)
            return not self._abort.is_set()

        params = llama.llama_model_default_params()
        params.load_mode = self.plan.load_mode
        params.use_extra_bufts = self.options.use_repack and not self.plan.from_disk
        params.n_gpu_layers = 0
        if self.plan.experts is not None:
            params.kv_overrides = bindings.kv_overrides(dict([self.plan.experts]))
        callback = llama.llama_progress_callback(progress)
        params.progress_callback = callback
        self._model = llama.llama_model_load_from_file(os.fsencode(self.header.path), params)
        if self._abort.is_set():
            raise Aborted
        if not self._model:
            raise _load_error(self.header.path)
        if llama.llama_model_has_encoder(self._model) or not llama.llama_model_has_decoder(self._model):
            raise ModelUnsupported(
                f"{self.header.path.name} is not a chat model: {self.header.architecture} is an encoder architecture.",
                "Choose a decoder-only model.",
            )

    def _make_context(self, threads: tuple[int, ...] | ThreadPool) -> None:
        plan = self.plan
        params = llama.llama_context_default_params()
        params.n_ctx = plan.n_ctx
        params.n_batch = plan.n_batch
        params.n_ubatch = plan.n_ubatch
        params.n_seq_max = 1
        # 0 would reserve one row of logits for every token of a batch.
        params.n_outputs_max = plan.n_outputs
        params.n_threads = params.n_threads_batch = (
            threads.n_threads if isinstance(threads, ThreadPool) else len(threads)
        )
        params.flash_attn_type = plan.flash_attn
        params.type_k, params.type_v = plan.type_k, plan.type_v
        # Layers with a sliding window keep its tokens and one batch, as `fit.kv_cells` counts; the store of states goes
        # back where such a cache cannot.
        params.swa_full = False
        if has_recurrent_state(self._model):
            request_rollback(params, plan.n_rs_seq)
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise _context_error(plan)
        if not llama.llama_get_memory(self._context):
            raise ModelUnsupported(
                f"{self.header.path.name} is not a chat model: it has no KV cache.",
                "Choose a text generation model.",
            )
        if isinstance(threads, ThreadPool):
            self.pool = threads
        else:
            self.pool = self._own_pool = ThreadPool(threads, self.options.poll)
        self.pool.attach(self._context)
        self.sequence = Sequence(
            self._context,
            n_vocab=self.vocab.n_tokens,
            abort=self._abort,
            is_recurrent=has_recurrent_state(self._model),
            n_window=int(llama.llama_model_n_swa(self._model)),
        )

    def _warm_up(self) -> None:
        """Evaluate a token, to fault in remaining pages and to check the weights.

        For models with a recurrent state some more, to find out how it can be rolled back.

        Raises:
            ModelDamaged: the logits are NaN or infinite.
        """
        sequence = self.sequence
        token = self.vocab.bos if self.vocab.bos >= 0 else 0
        row = sequence.step(token)
        if not np.isfinite(row).all():
            raise ModelDamaged(
                f"{self.header.path.name} produces NaN or infinite logits: its weights are damaged.",
                "Download it again.",
            )
        sequence.find_divisions()
        sequence.clear()
        if sequence.is_recurrent:
            sequence.rollback = detect_rollback(sequence)

    def _describe(self, fingerprint: str, load_ms: float) -> None:
        header, plan = self.header, self.plan
        notes = list(self._notes)
        if not header.chat_template:
            notes.append("No chat template: this may be a base model that continues text instead of answering.")
        if not self.vocab.has_tokenizer:
            notes.append("This model has no tokenizer: it reads and writes token IDs, not text.")
        if self.sequence.rollback.note:
            notes.append(self.sequence.rollback.note)
        if self.options.mlock and any("failed to mlock" in line for line in bindings.log.lines()):
            notes.append("mlock failed: the model is not fully locked in memory.")
        self.info = ModelInfo(
            path=str(header.path),
            name=header.name,
            architecture=header.architecture,
            quantization=header.quantization,
            n_params=header.n_params,
            size=header.size,
            n_ctx=self.sequence.n_ctx,
            n_ctx_train=header.n_ctx_train,
            n_vocab=self.vocab.n_tokens,
            n_layer=header.n_layer,
            n_threads=self.pool.n_threads,
            cpus=self.pool.cpus,
            kv_size=plan.need.kv,
            has_template=bool(header.chat_template),
            load_ms=load_ms,
            fingerprint=fingerprint,
            n_expert=header.number("expert_count"),
            n_expert_used=plan.experts[1] if plan.experts else header.number("expert_used_count"),
            notes=tuple(notes),
        )

    def state_key(self) -> str:
        """Return everything that a saved KV state depends on, besides the text."""
        header, options = self.header, self.options
        # Models with two sets of RoPE factors choose by the length of the context (llama_model::get_rope_factors).
        trained = header.number("rope.scaling.original_context_length")
        return "|".join(
            (
                self.info.fingerprint,
                options.type_k,
                options.type_v,
                options.flash_attn,
                str(self.plan.experts or ""),
                "long" if trained and self.sequence.n_ctx > trained else "",
                bindings.engine_info().llama_commit,
            )
        )

    def free(self) -> None:
        """Free everything in the order that llama.cpp needs. Calling it again does nothing."""
        if self._context:
            bindings.detach_threadpool(self._context)
            if hasattr(self, "sequence"):
                self.sequence.free()
            llama.llama_free(self._context)
            self._context = None
        if self._own_pool is not None:
            self._own_pool.free()
            self._own_pool = None
        if self._model:
            llama.llama_model_free(self._model)
            self._model = None


def _reason() -> str:
    """Return the last errors that llama.cpp logged, without its function names."""
    lines = bindings.log.lines(errors_only=True)
    texts = [line.split(": ", 1)[-1] if "(" not in line.split(": ", 1)[0] else line for line in lines]
    return "; ".join(dict.fromkeys(texts[-3:])) or "llama.cpp gave no reason"


def _load_error(path: Path) -> Exception:
    reason = _reason()
    if any(sign in reason for sign in _UNSUPPORTED):
        return ModelUnsupported(f"llama.cpp does not support {path.name}: {reason}.", "Choose another model.")
    if any(sign in reason for sign in _NO_MEMORY):
        return DoesNotFit(f"Not enough memory for {path.name}: {reason}.", "Choose a smaller model.")
    return ModelDamaged(f"llama.cpp cannot load {path.name}: {reason}.", "Download it again or choose another file.")


def _context_error(plan: LoadPlan) -> Exception:
    reason = _reason()
    if any(sign in reason for sign in _NO_MEMORY):
        return DoesNotFit(
            f"Not enough memory for a context of {plan.n_ctx:,} tokens: {reason}.", "Use a smaller --ctx."
        )
    return GenerationFailed(
        f"llama.cpp rejected the context options: {reason}.", "Check cache types, flash attention and batch sizes."
    )
