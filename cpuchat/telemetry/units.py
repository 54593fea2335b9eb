"""How figures are written, everywhere the same: as many digits as mean something, never without a unit."""

from __future__ import annotations


def rate(value: float) -> str:
    """tok/s without its unit: `7.31`, `41.3`, `262`, `1,407`."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def duration(seconds: float) -> tuple[str, str]:
    """A waiting time as number and unit: ("4", "ms"), ("0.21", "s")."""
    return (f"{1e3 * seconds:.0f}", "ms") if seconds < 0.0995 else (f"{seconds:.2f}", "s")


def factor(value: float) -> str:
    """How many times as fast: `0.97×`, `1.64×`, `12.3×`."""
    return f"{value:.2f}×" if value < 9.995 else f"{value:.1f}×"


def bandwidth(bytes_per_s: float) -> str:
    """GB/s without the unit, decimal: `0.42`, `7.3`, `44`, `367`."""
    value = bytes_per_s / 1e9
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"
