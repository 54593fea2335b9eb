"""Formats quantization types as list rows and details: size, fit and speed of the resulting file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuchat.models.quantize.types import PRECISE
from cpuchat.models.shortlist import PACE
from cpuchat.present import prediction
from cpuchat.present.rows import ListRow
from cpuchat.telemetry import units
from cpuchat.telemetry.units import size
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.library.model import LocalModel
    from cpuchat.models.machine import Machine
    from cpuchat.models.prediction import Prediction
    from cpuchat.models.quantize.forecast import Forecast
    from cpuchat.models.quantize.types import QuantType
    from cpuchat.protocol import LoadOptions


@dataclass(frozen=True)
class TypePrediction:
    """The prediction for one type: its file, fit and speed; `speed_up` against the source, `arrangement` of its weights
    once they are loaded on this machine.
    """

    forecast: Forecast
    prediction: Prediction
    speed_up: float
    arrangement: str


def predict_type(source: GGUFHeader, forecast: Forecast, machine: Machine, options: LoadOptions) -> TypePrediction:
    """Predict what `forecast` gives on `machine`. Takes some milliseconds: call it in a thread."""
    from cpuchat.hardware.instructions import instructions
    from cpuchat.models.prediction import predict
    from cpuchat.models.quantize.forecast import speed_up
    from cpuchat.models.repack import describe

    return TypePrediction(
        forecast=forecast,
        prediction=predict(forecast.header, options, machine),
        speed_up=speed_up(source, forecast.header),
        arrangement=describe(forecast.header, instructions()),
    )


def title(model: LocalModel) -> str:
    """`Quantize Qwen2.5-1.5B-Instruct F16`."""
    known = model.quantization.lower() in model.name.lower()
    return clean_line(f"Quantize {model.name}" + ("" if known else f" {model.quantization}"))


def recommended(found: Mapping[str, TypePrediction | str], names: Sequence[str], source_size: int) -> str:
    """Return the best of `names` (best first) that fits, keeps up with reading and saves space; "" until known. None
    that quantizes a second time: the original is better.
    """
    for name in names:
        if (one := found.get(name)) is None:
            break
        if isinstance(one, str) or one.forecast.lossy or one.forecast.file_size >= source_size:
            continue
        if one.prediction.verdict == "fits" and (one.prediction.tok_s or PACE) >= PACE:
            return name
    return ""


def why_recommended(found: TypePrediction) -> str:
    """Say what a recommended type has and better ones lack."""
    if found.prediction.tok_s is None:
        return "the best quality that saves space and fits"
    return f"the best quality that saves space, fits and keeps up with reading ({PACE:g} tok/s)"


def row(kind: QuantType, found: TypePrediction | str | None) -> ListRow:
    """Format a line of the list. `found` is the problem of a type that cannot be made, None while it is computed."""
    columns, dim = ("", "", "", ""), kind.needs_imatrix
    if isinstance(found, str):
        columns, dim = ("", "", "impossible", ""), True
    elif found is not None:
        speed = prediction.speed(found.prediction) or units.factor(found.speed_up)
        fit = prediction.fit(found.prediction)
        columns = (f"{found.forecast.bits:.2f} bit", size(found.forecast.file_size), fit, speed)
        dim = found.forecast.needs_imatrix
    return ListRow(key=kind.name, name=f"{kind.name} · {kind.about}", columns=columns, dim=dim)


def details(kind: QuantType, found: TypePrediction | str | None, source_size: int) -> list[tuple[str, str]]:
    """Label and text of all about one type; `found` as for `row`."""
    if found is None:
        return [("quality", kind.about), ("file", "computing…")]
    if isinstance(found, str):
        return [("quality", kind.about), ("problem", clean_line(found))]
    forecast = found.forecast
    smaller = source_size / max(forecast.file_size, 1)
    change = f"{units.factor(smaller)} smaller" if smaller > 1 else "larger than the source"
    again = f"requantized from {', '.join(forecast.lossy)}: loses quality twice" if forecast.lossy else ""
    matrix = "an importance matrix: `cpuchat models quantize --imatrix FILE`" if forecast.needs_imatrix else ""
    rows = [
        ("quality", kind.about),
        ("needs", matrix),
        ("warning", again),
        ("file", f"{size(forecast.file_size)}, {change}, {forecast.bits:.2f} bits per weight"),
        ("memory", found.prediction.explained),
        ("speed", f"{units.factor(found.speed_up)} vs the source, where decoding is memory-bound"),
        ("at load", found.arrangement),
        ("here", prediction.speed_with_basis(found.prediction)),
    ]
    return [(label, text) for label, text in rows if text]


def requantizing(model: LocalModel) -> str:
    """Return why `model` is no good source; "" when it is one."""
    if not model.quantization or model.quantization.upper() in PRECISE:
        return ""
    return f"{model.quantization} is already quantized; quantizing again loses more quality. Use F16, BF16 or Q8_0."


def original_row(key: str, repo: str) -> ListRow:
    """Format the line that leads to the repository of a model that is quantized already."""
    return ListRow(key, "★", "Get the original", note=repo)


def forecast_progress(done: int, total: int) -> str:
    return f"Computing sizes and speeds · {done} of {total}"
