"""Quantization types, the place of a new file, and the process in which llama.cpp forecasts a file (in a dry run that
reads no weights) and writes it: lines of JSON both ways; it ends with its input.

Sources: src/llama-quant.cpp of llama.cpp (llama_ftype_get_default_type, llama_tensor_get_type). Bits per weight are
those of Llama 3.1 8B where tools/quantize/README.md has them, else those of the type itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import DiskFull, QuantizeFailed, UsageError
from cpuchat.base.files import check_place
from cpuchat.base.line_process import LineProcess
from cpuchat.base.processes import python_command
from cpuchat.costs.model import BITS, N_PAST, bytes_read, pass_cost
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.file_names import quantization_of, without_prefix, without_quantization
from cpuchat.models.fit import LAYER_TABLE, gigabytes
from cpuchat.models.gguf.header import GGUFHeader, known_as, model_files, read_model
from cpuchat.models.gguf.parse import ALIGNMENT, BY_NAME, FILE_TYPE_BY_NAME, PRECISE, TensorInfo
from cpuchat.models.library.places import LocalModel, hub_cache, is_inside, store_folders
from cpuchat.models.ollama import file_name
from cpuchat.models.support import scalar_types, why_slow
from cpuchat.models.traffic import typical_work
from cpuchat.protocol.model_info import ModelWork

if TYPE_CHECKING:
    from cpuchat.models.library.library import Library  # the quantizing process needs it not
    from cpuchat.models.machine import Machine


class QuantType(msgspec.Struct, frozen=True):
    """`name` as in file names, `tensor` the type of most of its tensors.

    `bits` per weight of a typical model, including scales and larger tensors."""

    name: str
    tensor: str
    bits: float
    about: str

    @property
    def number(self) -> int:
        """`enum llama_ftype`."""
        return FILE_TYPE_BY_NAME[self.name]


# Not those that llama.cpp refuses without an importance matrix (tensor_requires_imatrix). Best quality first.
TYPES: tuple[QuantType, ...] = (
    QuantType("F32", "F32", 32.0, "lossless; four times the size of Q8_0"),
    QuantType("F16", "F16", 16.0, "as published"),
    QuantType("BF16", "BF16", 16.0, "as published"),
    QuantType("Q8_0", "Q8_0", 8.5, "nearly lossless"),
    QuantType("Q6_K", "Q6_K", 6.56, "very low loss"),
    QuantType("Q5_K_M", "Q5_K", 5.7, "low loss"),
    QuantType("Q5_K_S", "Q5_K", 5.57, "low loss"),
    QuantType("Q5_1", "Q5_1", 6.0, "older; Q5_K_M is better"),
    QuantType("Q5_0", "Q5_0", 5.5, "older; Q5_K_S is better"),
    QuantType("Q4_K_M", "Q4_K", 4.89, "the usual trade-off"),
    QuantType("Q4_K_S", "Q4_K", 4.67, "a little smaller than Q4_K_M"),
    QuantType("IQ4_NL", "IQ4_NL", 4.68, "like Q4_K_S"),
    QuantType("IQ4_XS", "IQ4_XS", 4.46, "small, slower to unpack"),
    QuantType("Q4_1", "Q4_1", 5.0, "older; Q4_K_M is better"),
    QuantType("Q4_0", "Q4_0", 4.5, "simple; repacked on most CPUs"),
    QuantType("MXFP4", "MXFP4", 4.25, "for mixtures of experts such as gpt-oss"),
    QuantType("Q3_K_L", "Q3_K", 4.3, "noticeable loss"),
    QuantType("Q3_K_M", "Q3_K", 4.0, "noticeable loss"),
    QuantType("IQ3_M", "IQ3_S", 3.76, "noticeable loss, slower to unpack"),
    QuantType("IQ3_S", "IQ3_S", 3.66, "noticeable loss, slower to unpack"),
    QuantType("Q3_K_S", "Q3_K", 3.64, "substantial loss"),
    QuantType("Q2_K", "Q2_K", 3.16, "high loss"),
    QuantType("Q2_0", "Q2_0", 2.25, "only for models trained for it"),
    QuantType("TQ2_0", "TQ2_0", 2.06, "only for ternary models"),
    QuantType("TQ1_0", "TQ1_0", 1.69, "only for ternary models"),
    QuantType("Q1_0", "Q1_0", 1.125, "only for models trained for it"),
)
SMALLER = 0.97
"""Share of the size that another type must stay below: a file that is hardly smaller only loses quality."""
_BY_NAME = {kind.name: kind for kind in TYPES}
# Aliases of tools/quantize/quantize.cpp.
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4_MOE": "MXFP4"}


def smaller_types(model: LocalModel) -> tuple[QuantType, ...]:
    """Return the types that make a model smaller, by their usual bits per weight, and have fewer than its own."""
    own = _BY_NAME.get(without_prefix(model.quantization.upper()))
    maximum = min(8 * SMALLER * model.size / max(model.n_params, 1), own.bits if own is not None else math.inf)
    return tuple(kind for kind in TYPES if kind.bits < maximum)


def quant_type(text: str) -> QuantType:
    """Return the type that `text` names, in any case. Raises UsageError: there is none; the hint names similar ones."""
    name = text.strip().upper()
    name = _ALIASES.get(name, name)
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in FILE_TYPE_BY_NAME:
        raise UsageError(
            f"{name} requires an importance matrix, which cpuchat does not use.",
            "Download such a file, make it with llama-quantize --imatrix, or choose a type of 4 bits or more.",
        )
    close = difflib.get_close_matches(name, [*_BY_NAME, *_ALIASES], n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else "`cpuchat models quantize --list` lists them."
    raise UsageError(f"There is no quantization {text.strip()[:40]!r}.", hint)


class MatrixTypes(msgspec.Struct, frozen=True):
    """Tensor types ("Q4_0") of the output matrix and of the token embeddings; "": those that llama.cpp chooses."""

    output: str = ""
    embedding: str = ""

    def of(self, source: GGUFHeader) -> MatrixTypes:
        """Return them for a source, of which llama.cpp takes a tied matrix for its embeddings; those of layers follow
        the token embeddings. Raises UsageError: the source cannot have them, or the output would be slow here."""
        table, is_tied = "token_embd.weight", source.output_matrix != "output.weight"
        if is_tied and self.embedding:
            raise UsageError(
                f"{file_name(source.path)} has one matrix for token embeddings and output (tied).",
                "Set its type with --output-tensor-type alone.",
            )
        if self.output in scalar_types(engine_cpu()):
            raise UsageError(f"{why_slow(self.output)}.", "Choose another type of the output matrix, such as Q4_0.")
        made = MatrixTypes(self.output, self.output) if is_tied else self
        kinds = {"output.weight": made.output, table: made.embedding, LAYER_TABLE: made.embedding}
        for tensor in source.tensors:
            kind = BY_NAME.get(kinds.get(tensor.name, ""))
            if kind is not None and tensor.shape[0] % kind.block:
                raise UsageError(
                    f"{kind.name} has blocks of {kind.block} values, which do not divide the {tensor.shape[0]:,} in a "
                    f"row of {tensor.name}.",
                    "Choose a type with smaller blocks, such as Q4_0 or Q8_0.",
                )
        return made


AUTO_TYPES = MatrixTypes()

PART = ".quantizing"
"""Suffix until the file is complete. Not `.part`, which browsers use for downloads."""
_MARGIN_BYTES = 1 << 20  # a forecast leaves out a few added metadata entries


def suggested_path(source: GGUFHeader, kind: QuantType, folder: Path, matrices: MatrixTypes = AUTO_TYPES) -> Path:
    """Return `<model>-Q4_K_M.gguf` in `folder`: the source's name with its quantization and part number replaced, and
    the types of its matrices before that (`<model>-output-Q4_0-Q4_K_M.gguf`)."""
    known = re.sub(r"[/:]+", "-", known_as(source.path))
    stem, before = without_quantization(known), quantization_of(known)
    for matrix, own in msgspec.structs.asdict(matrices).items():
        stem += f"-{matrix}-{own}" if own else ""
    in_lower_case = before and before.lower() in known  # no file beside it may differ in case only
    return folder / f"{stem}-{kind.name.lower() if in_lower_case else kind.name}.gguf"


def suggested_folder(source: Path, library: Library) -> Path:
    """Return the folder of `source` if it is the user's, else the first writable folder of the library.

    Nothing is put into a cache, the store of another program or the package, where it could not be deleted."""
    kept = any(
        is_inside(source.parent, one) for one in (library.cache, hub_cache(), *store_folders(), paths.demo_dir())
    )
    places = [*([] if kept else [source.parent]), *library.folders]
    return next((place for place in places if is_folder(place, os.W_OK | os.X_OK)), paths.made_models_dir())


def is_folder(path: Path, mode: int = os.F_OK) -> bool:
    """Return whether `path` is a folder with access `mode`; False also for an invalid path."""
    return os.access(f"{path}/.", mode)


def check_out(out: Path, source: GGUFHeader, *, force: bool) -> None:
    """Check whether `out` may be made from `source`; creates cpuchat's own model folder. Raises UsageError: it may not,
    or it exists and `force` is not given."""
    try:
        if out.parent == paths.made_models_dir():
            out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and any(part.samefile(out) for part in model_files(source.path)):
            raise UsageError("A model cannot be quantized into itself.", "Give OUT, or name a larger SOURCE.")
        check_place(out, force=force)
    except OSError as error:
        raise _unwritable(out, error) from None


def check_space(part: Path, size: int) -> None:
    """Raise DiskFull when the rest of `size` bytes does not fit on the disk of `part`."""
    free = shutil.disk_usage(part.parent).free
    if size + _MARGIN_BYTES - part.stat().st_size > free:
        raise DiskFull(
            f"Not enough disk space: the file needs {gigabytes(size)} GB, {gigabytes(free)} GB free in {part.parent}.",
            "Free some space, or choose another folder or a smaller type.",
        )


@contextlib.contextmanager
def part_of(out: Path) -> Iterator[Path]:
    """Yield the partial file beside `out`, empty; deleted afterwards, unless it was renamed. Raises UsageError: another
    program writes it, or the folder cannot be written."""
    part = out.with_name(out.name + PART)
    try:
        part.touch(exist_ok=False)
    except FileExistsError:
        raise UsageError(
            f"{part} exists: another program is writing {out.name}, or was killed.", "Wait for it, or delete that file."
        ) from None
    except OSError as error:
        raise _unwritable(part, error) from None
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"Cannot write {path}: {error.strerror}.", "Choose another folder or name.")


class QuantizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request: quantize `source` to the file type `number` and write `out`; "": only forecast it, without reading its
    weights. `matrices` as of `MatrixTypes.of`; `keeps`: other tensors stay as they are. `requantize` allows tensors
    that are already quantized."""

    source: str
    number: int
    out: str = ""
    matrices: MatrixTypes = AUTO_TYPES
    keeps: bool = False
    threads: int = 1
    requantize: bool = False


class TensorStarted(msgspec.Struct, frozen=True, kw_only=True, tag="tensor_started"):
    """Progress: the tensor `name` is being written."""

    name: str


class QuantizeFinished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Answer: the file is written, and the parent checks it; or what it would be: the `types` of its tensors by
    name."""

    types: dict[str, str] = {}


Answer = TensorStarted | QuantizeFinished


class QuantizeProcess(LineProcess[Answer]):
    """An async context manager; leaving it kills the process."""

    def __init__(self) -> None:
        super().__init__(python_command("-m", "cpuchat.engine.quantize"), "quantizing process", Answer, QuantizeFailed)


class Forecast(msgspec.Struct, frozen=True):
    """The file that `type` would give. `header` is its header, its size exact to a few hundred bytes.

    `lossy`: types of tensors that are already quantized below Q8_0 and would be quantized again."""

    type: QuantType
    header: GGUFHeader
    lossy: tuple[str, ...] = ()


class SpeedHere(NamedTuple):
    """How many times as fast a quantization decodes on a machine as another one of the same model, and would by the
    bytes alone that a token reads. `is_measured`: with passes of these types."""

    ratio: float
    by_bytes: float
    is_measured: bool = False


def speed_here(machine: Machine, made: ModelWork, than: ModelWork) -> SpeedHere:
    """Compare the works of two quantizations; where no passes are known, by their bytes."""
    by_bytes = bytes_read(than, 1, N_PAST) / max(bytes_read(made, 1, N_PAST), 1.0)
    if machine.profile is None:
        return SpeedHere(by_bytes, by_bytes)
    types = {one.type for work in (made, than) for one in work.dense}
    seconds, before = (pass_cost(machine.profile, work, 1, N_PAST).seconds for work in (made, than))
    return SpeedHere(before / seconds, by_bytes, types <= machine.measured_types)


_USUAL_PARAMS = 8e9


def typical_speeds(machine: Machine) -> dict[str, tuple[float, SpeedHere]]:
    """Return the usual bits per weight of each type, and the speed of a model of 8B in it against the same in Q8_0;
    without types of which no CPU's rate is known."""
    works = {
        one.name: typical_work(one.bits * _USUAL_PARAMS / 8, one.tensor, params=_USUAL_PARAMS)
        for one in TYPES if one.tensor in BITS
    }  # fmt: skip
    return {name: (_BY_NAME[name].bits, speed_here(machine, work, works["Q8_0"])) for name, work in works.items()}


async def source_header(source: Path) -> GGUFHeader:
    """Read the header of a model to quantize. Raises ModelNotFound, ModelDamaged: as `read_model`; UsageError: it is
    not a language model."""
    header = await asyncio.to_thread(read_model, source)
    if header.other:
        raise UsageError(
            f"{file_name(source)} is {header.other}, not a language model.", "Choose the GGUF file of a language model."
        )
    return header


def quantize_request(source: GGUFHeader, kind: QuantType, matrices: MatrixTypes = AUTO_TYPES) -> QuantizeRequest:
    """Return the request to forecast the model of `source` (from `source_header`) as `kind`. Where it is of that type
    already, only its `matrices` change. Raises UsageError: as `MatrixTypes.of`."""
    keeps = matrices != AUTO_TYPES and source.quantization == kind.name
    return QuantizeRequest(source=str(source.path), number=kind.number, matrices=matrices.of(source), keeps=keeps)


async def forecast_type(
    process: QuantizeProcess, source: GGUFHeader, kind: QuantType, matrices: MatrixTypes = AUTO_TYPES
) -> Forecast:
    """Forecast what `quantize_request` asks for. Raises QuantizeFailed: llama.cpp does not support the architecture, or
    this type for it; UsageError: as `MatrixTypes.of`."""
    await process.send(quantize_request(source, kind, matrices))
    answer = await process.receive()
    if not isinstance(answer, QuantizeFinished) or answer.types.keys() != {tensor.name for tensor in source.tensors}:
        raise QuantizeFailed(f"llama.cpp reads other tensors from {file_name(source.path)} than its header lists.")
    changed = {t.type for t in source.tensors if answer.types[t.name] != t.type}
    tensors: list[TensorInfo] = []
    at = 0
    for tensor in source.tensors:
        new = BY_NAME[answer.types[tensor.name]]
        nbytes = tensor.n_elements // new.block * new.nbytes
        tensors.append(msgspec.structs.replace(tensor, type=new.name, offset=at, nbytes=nbytes))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    metadata = {key: value for key, value in source.metadata.items() if not key.startswith("split.")}
    header = msgspec.structs.replace(
        source,
        metadata=metadata | {"general.file_type": kind.number},
        tensors=tensors,
        file_size=source.data_offset + at,
        alignment=ALIGNMENT,
    )
    return Forecast(kind, header, tuple(sorted(changed - PRECISE)))
