"""Formats figures, the same everywhere: with the significant digits, and a unit beside them."""

from __future__ import annotations

import datetime


def rate(value: float) -> str:
    """Format tok/s without its unit: `7.31`, `41.3`, `262`, `1,407`."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def four_digits(value: float) -> str:
    """Format a figure that others are divided by: `0.9850`, `7.312`, `41.32`, `262.4`, `1,407`."""
    return f"{value:,.0f}" if value >= 999.95 else f"{value:#.4g}"


def about(value: float) -> str:
    """Format a predicted tok/s, rounded to its accuracy: `0.04`, `7.3`, `41`, `1,407`."""
    return f"{value:.1g}" if value < 0.095 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def duration(seconds: float) -> tuple[str, str]:
    """Format a waiting time as number and unit: ("4", "ms"), ("0.21", "s")."""
    return (f"{1e3 * seconds:.0f}", "ms") if seconds < 0.0995 else (f"{seconds:.2f}", "s")


def factor(value: float) -> str:
    """Format a speed-up: `0.97×`, `1.64×`, `12.3×`."""
    return f"{value:.2f}×" if value < 9.995 else f"{value:.1f}×"


def change(share: float) -> str:
    """Format a gain or a loss: `+3.2 %`, `−1.0 %`; what rounds to zero has no sign."""
    text = f"{100 * abs(share):.1f} %"
    return text if text == "0.0 %" else ("+" if share > 0 else "−") + text


def bandwidth(bytes_per_s: float) -> str:
    """Format GB/s without the unit, decimal: `0.42`, `7.3`, `44`, `367`."""
    value = bytes_per_s / 1e9
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def gigabytes(count: float) -> str:
    """Format bytes (or bytes per second) in decimal GB without the unit, three digits: `1.07`, `25.3`, `367`."""
    return rate(count / 1e9)


def context(used: int, size: int) -> str:
    """Format used and total context in tokens: `48/8k`, `7.9k/8k`. k is 1024 where the size is a multiple of that."""
    unit = 1024 if size % 1024 == 0 else 1000

    def short(count: int) -> str:
        value = count / unit
        return str(count) if count < 1000 else f"{value:.0f}k" if count % unit == 0 else f"{value:.1f}k"

    return f"{short(used)}/{short(size)}"


def parameters(count: int) -> str:
    """Format a parameter count as in model names: `494M`, `7.6B`, `70.6B`."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:
            value = count / unit
            return f"{value:.0f}{letter}" if value >= 99.95 else f"{value:.1f}{letter}"
    return str(count)


def size(n_bytes: float) -> str:
    """Format a size in bytes, at most 7 characters: `808 kB`, `1.5 GB` is 1.5e9 bytes."""
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB" if value < 99.95 else f"{value:,.0f} TB"


def time_left(seconds: float) -> str:
    """Format the remaining time: `47 s left`, `12 min left`, `3.2 h left`; at most 11 characters."""
    if seconds < 99.5:
        return f"{seconds:.0f} s left"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min left"
    return f"{seconds / 3600:.1f} h left" if seconds < 99 * 3600 else "days left"


def plural(count: int, thing: str) -> str:
    """Format a count with its noun: `1 message`, `1,203 tokens`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def count(number: int) -> str:
    """Format a download count in at most five characters: `950`, `12.3k`, `1.2M`."""
    if number < 1000:
        return str(number)
    value, unit = (number / 1e6, "M") if number >= 999_500 else (number / 1e3, "k")
    return f"{value:.0f}{unit}" if value >= 99.95 else f"{value:.1f}{unit}"


def tokens(count: int) -> str:
    """Format a token count in at most five characters (k = 1024 for round contexts): `512`, `2.1k`, `32k`, `1.0M`."""
    if count < 1000:
        return str(count)
    value = count / (1024 if count % 1024 == 0 else 1000)
    if value >= 1000:
        return f"{count / 1e6:.1f}M"
    return f"{value:.0f}k" if value >= 100 or value == int(value) else f"{value:.1f}k"


def ago(then: float, now: float) -> str:
    """Format the age of a time, both in seconds since 1970: `today`, `yesterday`, `12 days ago`; `never` for 0."""
    if not then:
        return "never"
    days = (datetime.date.fromtimestamp(now) - datetime.date.fromtimestamp(then)).days
    return "today" if days <= 0 else "yesterday" if days == 1 else f"{days:,} days ago"


def takes(limit: str, share: float) -> str:
    """`reading takes 83 % of a pass`: what takes most of it, as of `costs.model.PassCost`."""
    what = {"memory": "reading takes", "compute": "computing takes", "overhead": "fixed costs take"}[limit]
    return f"{what} {100 * share:.0f} % of a pass"
