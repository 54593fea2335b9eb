"""Runs a measurement's process in this one, so that a test can set what it finds."""

from __future__ import annotations

import contextlib
import io

import msgspec

from cpuchat.base.line_process import LineOutput
from cpuchat.engine.lockstep import Lockstep
from cpuchat.hardware.placement.placement import Placement
from cpuchat.quality.measure import QualityMeasurement
from cpuchat.quality.messages import Answer, Loading, Planned, QualityStart, Scored


def run_in_process(measurement: QualityMeasurement, placement: Placement) -> QualityMeasurement:
    """Run the measurement in this process. Raises CpuchatError."""
    start = QualityStart(
        base=str(measurement.base),
        others=tuple(str(one.path) for one in measurement.comparisons),
        cpus=placement.cpus,
        texts=measurement._texts,
        n_ctx=measurement.n_ctx,
    )
    stream = io.BytesIO()
    with contextlib.closing(Lockstep(start, LineOutput(stream))) as lockstep:
        lockstep.run()
    loaded: dict[str, float] = {}
    for line in stream.getvalue().splitlines():
        match msgspec.json.decode(line, type=Answer):
            case Loading(name=name, share=share):
                loaded[name] = share
            case Planned() as planned:
                measurement._plan(planned)
            case Scored() as scored:
                measurement._take(scored)
            case _:
                pass
    assert loaded and set(loaded.values()) == {1.0}
    return measurement
