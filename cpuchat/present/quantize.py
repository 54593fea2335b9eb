"""How quantizing reads on the screen. Plain functions, no widgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
class Prospect:
    """What one type would give: its file, whether it fits and how fast it would be; `speed_up` against the source,
    `arrangement` of its weights once they are loaded here."""

    forecast: Forecast
    outlook: Prediction
    speed_up: float
    arrangement: str


def prospect(source: GGUFHeader, forecast: Forecast, machine: Machine, options: LoadOptions) -> Prospect:
    """Judge a forecast. Takes some milliseconds: not for the UI's own thread."""
    from cpuchat.hardware.instructions import instructions
    from cpuchat.models.prediction import predict
    from cpuchat.models.quantize.forecast import speed_up
    from cpuchat.models.repack import arrangement

    return Prospect(
        forecast=forecast,
        outlook=predict(forecast.header, options, machine),
        speed_up=speed_up(source, forecast.header),
        arrangement=arrangement(forecast.header, instructions()),
    )


def title(model: LocalModel) -> str:
    """`Quantize Qwen2.5-1.5B-Instruct F16`."""
    known = model.quantization.lower() in model.name.lower()
    return clean_line(f"Quantize {model.name}" + ("" if known else f" {model.quantization}"))


def row(kind: QuantType, prospect: Prospect | str | None) -> ListRow:
    """A line of the list. `prospect` is a problem where the type cannot be made, None while it is worked out."""
    columns, dim = ("", "", "", ""), kind.needs_imatrix
    if isinstance(prospect, str):
        columns, dim = ("", "", "impossible", ""), True
    elif prospect is not None:
        speed = prediction.speed(prospect.outlook) or units.factor(prospect.speed_up)
        verdict = prediction.verdict(prospect.outlook)
        columns = (f"{prospect.forecast.bits:.2f} bit", size(prospect.forecast.file_size), verdict, speed)
        dim = prospect.forecast.needs_imatrix
    return ListRow(key=kind.name, name=f"{kind.name} · {kind.about}", columns=columns, dim=dim)


def details(kind: QuantType, prospect: Prospect | str | None, source_size: int) -> list[tuple[str, str]]:
    """All about one type, as label and text; `prospect` as for `row`."""
    if prospect is None:
        return [("quality", kind.about), ("file", "being worked out …")]
    if isinstance(prospect, str):
        return [("quality", kind.about), ("problem", clean_line(prospect))]
    forecast = prospect.forecast
    smaller = source_size / max(forecast.file_size, 1)
    change = f"{units.factor(smaller)} smaller" if smaller > 1 else "larger than it is now"
    again = f"quantized again from {', '.join(forecast.lossy)}: loses quality twice" if forecast.lossy else ""
    matrix = "an importance matrix: `cpuchat models quantize --imatrix FILE`" if forecast.needs_imatrix else ""
    rows = [
        ("quality", kind.about),
        ("needs", matrix),
        ("mind", again),
        ("file", f"{size(forecast.file_size)}, {change}, {forecast.bits:.2f} bits per weight"),
        ("memory", prospect.outlook.explained),
        ("speed", f"{units.factor(prospect.speed_up)} as fast as now, where memory sets the pace"),
        ("at load", prospect.arrangement),
        ("here", prediction.speed_and_why(prospect.outlook)),
    ]
    return [(label, text) for label, text in rows if text]


def foreseeing(done: int, total: int) -> str:
    return f"working out what each type would give · {done} of {total}"
