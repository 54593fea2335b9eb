"""Starts and talks to the quantizing process."""

from __future__ import annotations

from cpuchat.children import python_command
from cpuchat.errors import QuantizeFailed
from cpuchat.line_process import LineProcess
from cpuchat.models.quantize.messages import Answer


class QuantizeProcess(LineProcess[Answer]):
    """An async context manager; leaving it kills the process."""

    def __init__(self) -> None:
        super().__init__(python_command("-m", "cpuchat.engine.quantize"), "quantizing process", Answer, QuantizeFailed)
