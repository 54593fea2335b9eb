"""A model on its way into memory: its options are checked, its file is read ahead, weights, context and threads are
made, a first token is evaluated, and its limits on this machine are found.

llama.cpp answers most wrong options by aborting, or with a NULL: they are checked and completed (`plan_load`)
before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec
import numpy as np

from cpuchat.base.errors import (
    CpuchatError,
    DoesNotFit,
    GenerationFailed,
    Interrupted,
    ModelDamaged,
    ModelNotFound,
    ModelUnsupported,
    UsageError,
)
from cpuchat.costs.model import ALIKE
from cpuchat.engine.llama import bindings, kernels
from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.engine.llama.evidence import read_evidence
from cpuchat.engine.llama.head_sequence import EagleSequence, HeadSequence
from cpuchat.engine.llama.passes import Lane, Passes
from cpuchat.engine.llama.sequence import Aborted, Sequence, detect_rollback, has_recurrent_state, request_rollback
from cpuchat.engine.llama.threads import ThreadPool
from cpuchat.engine.llama.vocab import Vocab, check_bytes, special_types
from cpuchat.hardware.memory import available_within
from cpuchat.hardware.numa.mempolicy import allowed_nodes, current, in_effect
from cpuchat.hardware.numa.residency import missing_ranges, prepare_file, reader_cpus
from cpuchat.hardware.topology import read_topology
from cpuchat.models.engine_version import NO_MEMORY, NOT_LOCKED
from cpuchat.models.file_names import file_fingerprint
from cpuchat.models.fit import MemoryNeed, check_fit, draft_memory, plan_memory, state_bytes
from cpuchat.models.gguf.header import GGUFHeader, model_files, read_model
from cpuchat.models.gguf.parse import BY_NAME, LazyArray
from cpuchat.models.heads import HeadKind, is_own, title, usable_layers
from cpuchat.models.ollama import file_name, ollama_name
from cpuchat.models.support import check_supported, load_refusal
from cpuchat.models.traffic import model_work
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.options import MIN_CTX, UNQUANTIZED
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

N_OUTPUTS_MAX: Final = MAX_DEPTH + 1
"""Rows of logits per batch: enough for the longest verify pass. Each costs 4 * n_vocab bytes."""

_FLASH: Final = {
    "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
}
_LOAD_MODE: Final = {
    ("read", False): llama.LLAMA_LOAD_MODE_NONE,
    ("mmap", False): llama.LLAMA_LOAD_MODE_MMAP,
    ("read", True): llama.LLAMA_LOAD_MODE_MLOCK,
    ("mmap", True): llama.LLAMA_LOAD_MODE_MMAP_MLOCK,
}


@dataclass(frozen=True)
class LoadPlan:
    """Checked options, with the sizes of context and batches in place of "automatic", and what they cost. `n_outputs`:
    rows of logits of a batch. `n_rs_seq`: snapshots of a recurrent state to request (`sequence.Bounded`)."""

    options: LoadOptions
    need: MemoryNeed
    n_outputs: int
    n_rs_seq: int
    notes: tuple[str, ...]


def plan_load(header: GGUFHeader, options: LoadOptions, available: int, n_outputs: int = N_OUTPUTS_MAX) -> LoadPlan:
    """Check `options` against the model, the machine and `available` bytes of memory. Raises UsageError: an option is
    out of range or two contradict each other; ModelUnsupported: no language model; DoesNotFit: not enough memory."""
    if header.other:
        raise ModelUnsupported(
            f"{file_name(header.path)} is {header.other}, not a language model.", "Choose the main GGUF file beside it."
        )
    check_options(header, options)
    notes: list[str] = []
    if options.parallel != 1 and (reason := _not_parallel(header, options)):
        notes.append(f"One answer at a time: {reason}.")
        options = msgspec.structs.replace(options, parallel=1)
    need, n_rs_seq = plan_memory(header, options, available, n_outputs)
    n_ctx, n_batch = need.n_ctx, min(options.n_batch, need.n_ctx)
    if need.parallel == 1 and not options.parallel:
        notes.append("One answer at a time: there is no memory for the KV cache of another one.")
    options = msgspec.structs.replace(options, parallel=need.parallel)
    check_fit(need, available, header, options)
    if options.mlock:
        size, (soft, hard) = need.weights + need.repack, resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        if hard not in (resource.RLIM_INFINITY, -1) and hard < size and not may_lock_all():
            raise UsageError(
                f"Memory locking (mlock) needs {size / 1e9:.1f} GB, but the limit is {hard / 1e9:.3f} GB.",
                "Raise the limit (`ulimit -l unlimited`) or turn memory locking off.",
            )
    if header.n_ctx_train and n_ctx > header.n_ctx_train:
        notes.append(
            f"The context of {n_ctx:,} tokens is longer than the {header.n_ctx_train:,} that this model was trained "
            "with: quality may drop in long chats."
        )
    options = msgspec.structs.replace(options, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=min(options.n_ubatch, n_batch))
    return LoadPlan(options, need, n_outputs, n_rs_seq, tuple(notes))


def _not_parallel(header: GGUFHeader, options: LoadOptions) -> str:
    """Return why several answers of this model cannot run at once; "" where they can."""
    if state_bytes(header):
        return "llama.cpp cannot evaluate recurrent states of several answers in one pass that is the same as alone"
    if options.draft_path:
        with contextlib.suppress(CpuchatError):  # without it, which the load will say
            draft = Path(options.draft_path)
            if is_own(header.path, draft) or read_model(draft).is_head:
                return "a draft head follows one answer"
    return ""


def check_options(header: GGUFHeader, options: LoadOptions) -> None:
    """Raise UsageError for options that this model or other ones forbid; each by itself is checked as it is decoded."""
    if 0 < options.n_ctx < MIN_CTX:
        raise UsageError(f"The context size must be {MIN_CTX} or more.", "Use 0 to choose it automatically.")
    if options.type_v not in UNQUANTIZED and options.flash_attn == "off":
        raise UsageError(
            f"A quantized V cache ({options.type_v}) needs flash attention, which is off.",
            "Set flash attention to auto, or the V cache type to f16.",
        )
    for name, wanted, head in (("K", options.type_k, header.key_length), ("V", options.type_v, header.value_length)):
        block = BY_NAME[wanted.upper()].block
        if head and head % block:
            raise UsageError(
                f"The {name} cache type {wanted} has blocks of {block} values, which do not divide this model's head "
                f"size of {head}.",
                f"Set the {name} cache type to f16.",
            )
    if header.number("attention.key_length_mla") and options.type_k != options.type_v:
        raise UsageError(
            f"This model needs the same type for K and V, not {options.type_k} and {options.type_v}.",
            "Set both cache types to the same one.",
        )


def may_lock_all() -> bool:
    """Return whether CAP_IPC_LOCK (bit 14 of the effective capabilities) lifts the limit."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    capabilities = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(capabilities, 16) >> 14 & 1)


Progress = Callable[[str, int, int], None]
"""(phase, done, total); phase "reading" or "preparing", bytes, or "warming", one step."""

_READ_CHUNK: Final = 8 << 20
_SPREAD: Final = "No memory policy is in force here, so {n} readers, one per NUMA node, read the file into memory."
_PROGRESS_SECONDS: Final = 0.05


def read_ahead(
    header: GGUFHeader, on_progress: Progress, abort: AbortFlag, readers: Collection[tuple[int, ...]] = ((),)
) -> bool:
    """Read the missing parts of the file into the page cache; returns whether there were any. llama.cpp would do so
    inside one mmap call that neither reports progress nor can be cancelled.

    A page goes to the NUMA node of the CPU that reads it: with a set of CPUs per node in `readers`, they read
    interleaved chunks, so that all nodes get the same share however fast they read."""
    parts = model_files(header.path)
    total, n_readers = header.file_size, len(readers)
    try:
        missing: list[tuple[Path, int, int]] = []
        for part in parts:
            ranges = missing_ranges(part)
            missing += [(part, *one) for one in ([(0, part.stat().st_size)] if ranges is None else ranges)]
        chunks = [(part, at, min(end, at + _READ_CHUNK)) for part, start, end in missing
                  for at in range(start, end, _READ_CHUNK)]  # fmt: skip
        read = [max(0, total - sum(end - start for _, start, end in missing)), *[0] * n_readers]
        on_progress("reading", read[0], total)

        def read_share(n: int, cpus: tuple[int, ...]) -> None:
            if cpus:
                os.sched_setaffinity(0, cpus)
            buffer = memoryview(bytearray(_READ_CHUNK if chunks else 0))
            for part, at, end in chunks[n::n_readers]:
                with part.open("rb", buffering=0) as file:
                    file.seek(at)
                    while at < end and not abort.is_set() and (size := file.readinto(buffer[: end - at])):
                        at += size
                        read[1 + n] += size

        with ThreadPoolExecutor(n_readers) as pool:
            tasks = [pool.submit(read_share, n, cpus) for n, cpus in enumerate(readers)]
            while wait(tasks, timeout=_PROGRESS_SECONDS).not_done:
                on_progress("reading", min(sum(read), total), total)
            for task in tasks:
                task.result()
    except OSError as error:
        where = error.filename or header.path
        raise ModelNotFound(f"Cannot read {where}: {error.strerror}.", "Check permissions and the disk.") from None
    if abort.is_set():
        raise Aborted
    on_progress("reading", total, total)
    return bool(chunks)


def bring_in(header: GGUFHeader, cpus: Collection[int], on_progress: Progress, abort: AbortFlag) -> list[str]:
    """Read a file that will be mapped into the page cache, on the NUMA nodes where this process's policy, or else the
    `cpus` that compute, want it; returns notes for the user."""
    topology, policy, parts = read_topology(), current(), model_files(header.path)
    notes: list[str] = []
    if policy is not None and policy.places:
        notes += dict.fromkeys(note for part in parts if (note := prepare_file(part, policy, topology)))
    readers = reader_cpus(topology, cpus, policy, in_effect()[1])
    if read_ahead(header, on_progress, abort, readers) and len(readers) > 1:
        notes.append(_SPREAD.format(n=len(readers)))
    return notes


class Model:
    """A loaded model with its context and the sequences that chats use: `lanes`, of which `sequence` is the first.

    Made by `load`, used and freed on one thread. `pool`: the threads that it computes on, its own or those of another
    model. `kernel_types`: the tensor types that cpuchat's kernels multiply, as far as shapes allow."""

    def __init__(self, header: GGUFHeader, plan: LoadPlan, abort: AbortFlag) -> None:
        self.header = header
        self.plan = plan
        self.options = plan.options
        self._abort = abort
        self._model: Any = None
        self._context: Any = None
        self._own_pool: ThreadPool | None = None
        self._notes = list(plan.notes)
        self.kernel_types: frozenset[str] = frozenset()
        self.pool: ThreadPool
        self.vocab: Vocab
        self.sequence: Sequence
        self.lanes: Collection[Sequence] = ()
        self.passes: Passes | None = None
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
        roams: tuple[int, ...] = (),
        available: int | None = None,
        n_outputs: int = N_OUTPUTS_MAX,
    ) -> Model:
        """Load a GGUF file (any part of a split one).

        `threads`: CPUs to start one thread each on, which may move among `roams` as of `ThreadPool`; or the threads of
        another model, whose owner frees them after this one. `available`: bytes of memory that the model may take; None
        asks the system. `n_outputs`: rows of logits that one batch may ask for. `on_header` is called before the
        weights are read, and the calling thread is pinned. Raises Interrupted: `abort` was set; ModelNotFound,
        ModelDamaged, ModelUnsupported, DoesNotFit, UsageError."""
        bindings.start()
        started = perf_counter()
        header = read_model(path)
        available = available_for_model() if available is None else available
        plan = plan_load(header, options, available, n_outputs)
        check_supported(header)
        on_header(header)
        model = cls(header, plan, abort)
        cpus = threads.cpus if isinstance(threads, ThreadPool) else threads
        try:
            tell = functools.partial(on_progress, "measuring")
            model.kernel_types, notes = kernels.choose(header, plan.options, threads, tell, abort)
            model._notes += notes
            bindings.log.clear()
            if options.load_mode == "mmap":
                model._notes += bring_in(header, cpus, on_progress, abort)
            with ThreadPoolExecutor(1) as beside:  # llama.cpp loads on this thread, which leaves a core
                facts = beside.submit(
                    lambda: (check_bytes(header), special_types(header), file_fingerprint(header.path))
                )
                kernels.prepare(roams or cpus, len(cpus), options.load_mode == "mmap" and not options.mlock)
                model._model = model._load_file(header, on_progress)
            _, types, fingerprint = facts.result()
            model.vocab = Vocab(model._model, visible_markers, types)
            model._make_context(threads, roams, on_progress)
            model._describe(fingerprint, 1e3 * (perf_counter() - started))
        except Aborted:
            model.free()
            raise Interrupted("The load was cancelled.") from None
        except BaseException:
            model.free()
            raise
        return model

    def _load_file(self, header: GGUFHeader, on_progress: Progress) -> Any:
        """Load weights; returns the llama_model."""
        options = self.options
        phase = "preparing" if options.load_mode == "mmap" else "reading"
        total, last = header.file_size, 0.0
        if phase == "preparing":  # llama.cpp reads the vocabulary before it tells of anything
            on_progress(phase, 0, total)

        def progress(share: float, _: Any) -> bool:
            nonlocal last
            now, done = perf_counter(), int(share * total)
            if now - last >= _PROGRESS_SECONDS or done >= total:
                last = now
                on_progress(phase, done, total)
            return not self._abort.is_set()

        params = llama.llama_model_default_params()
        params.load_mode = _LOAD_MODE[options.load_mode, options.mlock]
        params.use_extra_bufts = options.use_repack
        kernels.select(self.kernel_types)
        params.n_gpu_layers = 0
        # Where a head is loaded: of a file of its own, or of the model's where it is named as its draft.
        named = is_own(header.path, Path(options.draft_path)) and usable_layers(header) > 0
        params.load_mtp = header.is_head or named
        callback = llama.llama_progress_callback(progress)
        params.progress_callback = callback
        parts = [os.fsencode(part) for part in model_files(header.path)]  # not by llama.cpp's rule for their names
        paths = (ctypes.c_char_p * len(parts))(*parts)
        model = llama.llama_model_load_from_splits(paths, len(parts), params)
        if self._abort.is_set():
            if model:
                llama.llama_model_free(model)
            raise Aborted
        if not model:
            raise load_refusal(header.path, _reason(file_name(header.path), "Choose a smaller model."))
        return model

    def _make_context(
        self, threads: tuple[int, ...] | ThreadPool, roams: tuple[int, ...], on_progress: Progress
    ) -> None:
        """Make context, threads and sequence. A token is evaluated, to fault in remaining pages and to check the
        weights, and with a recurrent state some more (`detect_rollback`). Raises ModelDamaged: NaN or infinite
        logits."""
        on_progress("warming", 0, 1)
        n_threads = threads.n_threads if isinstance(threads, ThreadPool) else len(threads)
        n_lanes = self.options.parallel
        sizes = (self.options.n_ctx, self.plan.n_outputs, n_lanes)  # the last one: a pass has a token of each lane
        self._context = self._new_context(n_threads, *sizes, n_lanes=n_lanes)
        if n_lanes > 1:
            self.passes = Passes(self._context, self.plan.n_outputs, self.options.prefill_share)
        if isinstance(threads, ThreadPool):
            self.pool = threads
        else:
            self.pool = self._own_pool = ThreadPool(threads, self.options.poll, roams)
        if self.passes is None:
            self.lanes = [self._new_sequence(self._context)]
        else:
            self.lanes = self.passes.lanes = [self._new_lane(self.passes, id) for id in range(n_lanes)]
        sequence = self.sequence = self.lanes[0]
        row = sequence.step(max(self.vocab.bos, 0))
        if not np.isfinite(row).all():
            raise ModelDamaged(
                f"{file_name(self.header.path)} produces NaN or infinite logits.",
                "Compare it with its checksum (`cpuchat models verify`); if it is intact, choose another quantization.",
            )
        sequence.find_divisions(self.lanes)
        sequence.clear()
        if sequence.is_recurrent:
            sequence.rollback = detect_rollback(sequence)

    def sequence_beside(self, n_ctx: int, n_outputs: int) -> Sequence:
        """Return an empty sequence for `n_ctx` tokens in a context of its own on the same threads, with `n_outputs`
        rows of logits for a batch. Free it with `free_sequence`, before this model. Raises DoesNotFit."""
        n_ctx = self.sequence.n_ctx if self._is_long(self.sequence.n_ctx) else min(n_ctx, self.sequence.n_ctx)
        # The rows in llama.cpp's output buffer, and in the graph's.
        kv = self.plan.need.kv // self.options.parallel
        need = 8 * n_outputs * self.vocab.n_tokens + kv * n_ctx // self.sequence.n_ctx
        if need > available_for_model():
            raise DoesNotFit(f"Scoring {n_ctx:,} tokens needs {need / 1e9:.2f} GB more.", "Close other programs.")
        context = self._new_context(self.pool.n_threads, n_ctx, n_outputs, n_outputs)
        return self._new_sequence(context)

    def open_head(
        self, header: GGUFHeader, kind: HeadKind, on_progress: Progress, available: int | None = None
    ) -> LoadedHead:
        """Return a draft head with a context of its own on the same threads, the model's own or the one in the file of
        `header`. Free it before this model. `available` and what is raised as of `load`, and GenerationFailed."""
        is_included, own = is_own(self.header.path, header.path), None
        need = draft_memory(header, self.options, self.sequence.n_ctx, self.header)
        check_fit(need, available_for_model() if available is None else available)
        try:
            if not is_included:
                if self.options.load_mode == "mmap":
                    bring_in(header, self.pool.cpus, on_progress, self._abort)
                own = self._load_file(header, on_progress)
            info = msgspec.structs.replace(
                self.info,
                path=str(header.path),
                name=title(kind) if is_included else ollama_name(header.path) or header.name,
                quantization="" if is_included else header.quantization,
                work=model_work(header, self.options, of_head=True),
                fingerprint=file_fingerprint(header.path),
            )
            return LoadedHead(self._head_sequence(header, kind, own or self._model), own, info, need)
        except BaseException as error:
            if own is not None:
                llama.llama_model_free(own)
            if isinstance(error, Aborted):
                raise Interrupted("The load was cancelled.") from None
            raise

    def _head_sequence(self, header: GGUFHeader, kind: HeadKind, model: Any) -> HeadSequence:
        context = self._new_context(self.pool.n_threads, self.sequence.n_ctx, self.plan.n_outputs, head=model)
        sizes: dict[str, Any] = {
            "n_vocab": int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))),
            "n_embd": int(llama.llama_model_n_embd_out(model)),
            "abort": self._abort,
        }
        layers = header.value("target_layers")
        if kind == "eagle3" and isinstance(layers, LazyArray):
            of_model: dict[str, Any] = {"n_layer": self.header.decoding_layers, "n_target": self.header.n_embd}
            sequence = EagleSequence(context, **sizes, **of_model, layers=layers.first(len(layers)))
        else:
            sequence = HeadSequence(context, **sizes, n_layer=int(bindings.n_layer_nextn(model)))
        self.pool.attach(sequence)
        return sequence

    @staticmethod
    def free_sequence(sequence: Sequence) -> None:
        bindings.detach_threadpool(sequence.context)
        sequence.free()
        llama.llama_free(sequence.context)

    def _new_context(
        self, n_threads: int, n_ctx: int, n_outputs: int, min_batch: int = 0, *, head: Any = None, n_lanes: int = 1
    ) -> Any:
        options = self.options
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx * n_lanes
        params.n_batch, params.n_ubatch = max(options.n_batch, min_batch), max(options.n_ubatch, min_batch)
        params.n_seq_max = n_lanes
        params.kv_unified = False  # each lane has cells of its own (`passes`)
        # 0 would reserve one row of logits for every token of a batch.
        params.n_outputs_max = n_outputs
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = _FLASH[options.flash_attn]
        params.type_k, params.type_v = BY_NAME[options.type_k.upper()].id, BY_NAME[options.type_v.upper()].id
        # Layers with a sliding window keep its tokens and one batch, as `fit.kv_cells` counts; the store of states goes
        # back where such a cache cannot.
        params.swa_full = False
        if head:
            params.ctx_other = self._context
            if int(bindings.n_layer_nextn(head)):
                params.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
        elif has_recurrent_state(self._model):
            request_rollback(params, self.plan.n_rs_seq)
        context = llama.llama_init_from_model(head or self._model, params)
        if not context:
            reason = _reason(f"a context of {n_ctx:,} tokens", "Use a smaller --ctx.")
            message = f"llama.cpp rejected the context options: {reason}."
            raise GenerationFailed(message, "Check cache types, flash attention and batch sizes.")
        if not llama.llama_get_memory(context):
            llama.llama_free(context)
            raise ModelUnsupported(
                f"{file_name(self.header.path)} is not a chat model: it has no KV cache.",
                "Choose a text generation model.",
            )
        return context

    def _new_sequence(self, context: Any) -> Sequence:
        sequence = Sequence(
            context,
            n_vocab=self.vocab.n_tokens,
            abort=self._abort,
            is_recurrent=has_recurrent_state(self._model),
            n_window=int(llama.llama_model_n_swa(self._model)),
        )
        self.pool.attach(sequence)
        return sequence

    def _new_lane(self, passes: Passes, id: int) -> Lane:
        n_window = int(llama.llama_model_n_swa(self._model))
        lane = Lane(self._context, passes, n_vocab=self.vocab.n_tokens, abort=self._abort, n_window=n_window, id=id)
        self.pool.attach(lane)
        return lane

    def _describe(self, fingerprint: str, load_ms: float) -> None:
        header, plan, cpus = self.header, self.plan, self.pool.cpus
        notes = list(self._notes)
        if not header.chat_template:
            notes.append("No chat template: this may be a base model that continues text instead of answering.")
        if self.options.kernels == "auto" and (refusal := kernels.refusal()):
            notes.append(refusal)
        if self.sequence.rollback.note:
            notes.append(self.sequence.rollback.note)
        if self.options.mlock:
            is_locked = bindings.lock_copies(self._model)
            if not is_locked or any(NOT_LOCKED in line for line in bindings.log.lines()):
                notes.append("mlock failed: the model is not fully locked in memory.")
        self.info = ModelInfo(
            path=str(header.path),
            name=ollama_name(header.path) or header.name,
            architecture=header.architecture,
            quantization=header.quantization,
            n_params=header.n_params,
            size=header.size,
            n_ctx=self.sequence.n_ctx,
            n_ctx_train=header.n_ctx_train,
            n_vocab=self.vocab.n_tokens,
            n_layer=header.n_layer,
            n_threads=self.pool.n_threads,
            cpus=cpus,
            # The calling thread is pinned, so its own affinity says nothing.
            cache_bytes=read_topology(allowed=cpus).l3_bytes(cpus),
            kv_size=plan.need.kv,
            has_template=bool(header.chat_template),
            fills_in=self.vocab.fill_tokens is not None,
            load_ms=load_ms,
            fingerprint=fingerprint,
            parallel=self.options.parallel,
            work=model_work(header, self.options, alike=ALIKE),
            notes=tuple(notes),
            evidence=read_evidence(self._model, self.pool.threads.ids),
        )

    @property
    def need(self) -> MemoryNeed:
        """Return the memory that it takes."""
        return self.plan.need

    def state_key(self) -> str:
        """Return everything that a saved KV state depends on, besides the text."""
        options = self.options
        return "|".join(
            (
                self.info.fingerprint,
                options.type_k,
                options.type_v,
                options.flash_attn,
                "long" if self._is_long(self.sequence.n_ctx) else "",
                *((f"parallel {self.options.parallel}",) if self.options.parallel > 1 else ()),
                bindings.engine_info().llama_commit,
            )
        )

    def _is_long(self, n_ctx: int) -> bool:
        """Models with two sets of RoPE factors choose by the length of the context (llama_model::get_rope_factors)."""
        trained = self.header.number("rope.scaling.original_context_length")
        return bool(trained) and n_ctx > trained

    def free(self) -> None:
        """Free everything in the order that llama.cpp needs. Calling it again does nothing."""
        if self._context:
            bindings.detach_threadpool(self._context)
            for lane in self.lanes:
                lane.free()
            if self.passes is not None:
                self.passes.free()
            llama.llama_free(self._context)
            self._context = None
        if self._own_pool is not None:
            self._own_pool.free()
            self._own_pool = None
        if self._model:
            llama.llama_model_free(self._model)
            self._model = None


@dataclass(frozen=True)
class LoadedHead:
    """A draft head beside its model, in the place of a draft model. `model`: the llama_model of a file of its own; None
    for the head that the model contains. `info` is the model's, with the head's path, name, quantization and work."""

    sequence: HeadSequence
    model: Any
    info: ModelInfo
    need: MemoryNeed

    def state_key(self) -> str:
        """As `Model.state_key`."""
        return f"head|{self.info.fingerprint}|{bindings.engine_info().llama_commit}"

    def free(self) -> None:
        """Free everything, before the model is freed."""
        Model.free_sequence(self.sequence)
        if self.model is not None:
            llama.llama_model_free(self.model)


def _reason(what: str, hint: str) -> str:
    """Return the last errors that llama.cpp logged, without its function names. Raises DoesNotFit where they tell of
    too little memory for `what`."""
    lines = bindings.log.lines(errors_only=True)
    texts = [line.split(": ", 1)[-1] if "(" not in line.split(": ", 1)[0] else line for line in lines]
    reason = "; ".join(dict.fromkeys(texts[-3:])) or "llama.cpp gave no reason"
    if any(sign in reason for sign in NO_MEMORY):
        raise DoesNotFit(f"Not enough memory for {what}: {reason}.", hint)
    return reason


def available_for_model() -> int:
    """Return the bytes available for a model: at most the free memory of the nodes that this process is bound to. The
    OOM killer ends a process that needs more than these have, however much there is on others."""
    policy = current()
    return available_within((policy.bound if policy is not None else ()) or allowed_nodes())
