"""Reads out numbers with their units, and the symbols that a voice would swallow or misread.

Plain numbers, years and amounts of money stay digits: every engine reads those itself.
"""

from __future__ import annotations

import re

# (singular, plural) of units that follow a number.
_UNITS: dict[str, tuple[str, str]] = {
    symbol: (name, plural or f"{name}s")
    for symbol, name, plural in (
        ("B", "byte", ""), ("kB", "kilobyte", ""), ("KB", "kilobyte", ""), ("MB", "megabyte", ""),
        ("GB", "gigabyte", ""), ("TB", "terabyte", ""), ("PB", "petabyte", ""), ("KiB", "kibibyte", ""),
        ("MiB", "mebibyte", ""), ("GiB", "gibibyte", ""), ("TiB", "tebibyte", ""), ("bit", "bit", ""),
        ("kbit", "kilobit", ""), ("Mbit", "megabit", ""), ("Gbit", "gigabit", ""),
        ("Mbps", "megabit per second", "megabits per second"),
        ("Gbps", "gigabit per second", "gigabits per second"), ("ns", "nanosecond", ""), ("µs", "microsecond", ""),
        ("us", "microsecond", ""), ("ms", "millisecond", ""), ("s", "second", ""), ("sec", "second", ""),
        ("min", "minute", ""), ("h", "hour", ""), ("hr", "hour", ""), ("hrs", "hour", ""), ("Hz", "hertz", "hertz"),
        ("kHz", "kilohertz", "kilohertz"), ("MHz", "megahertz", "megahertz"), ("GHz", "gigahertz", "gigahertz"),
        ("THz", "terahertz", "terahertz"), ("MT", "megatransfer", ""), ("GT", "gigatransfer", ""),
        ("W", "watt", ""), ("mW", "milliwatt", ""), ("kW", "kilowatt", ""), ("MW", "megawatt", ""),
        ("GW", "gigawatt", ""), ("Wh", "watt hour", ""), ("kWh", "kilowatt hour", ""), ("J", "joule", ""),
        ("kJ", "kilojoule", ""), ("V", "volt", ""), ("mV", "millivolt", ""), ("kV", "kilovolt", ""),
        ("mA", "milliamp", ""), ("mAh", "milliamp hour", ""), ("m", "meter", ""), ("km", "kilometer", ""),
        ("cm", "centimeter", ""), ("mm", "millimeter", ""), ("µm", "micrometer", ""), ("nm", "nanometer", ""),
        ("kg", "kilogram", ""), ("g", "gram", ""), ("mg", "milligram", ""), ("t", "ton", ""), ("lb", "pound", ""),
        ("lbs", "pound", ""), ("oz", "ounce", ""), ("ft", "foot", "feet"), ("l", "liter", ""), ("L", "liter", ""),
        ("ml", "milliliter", ""), ("mL", "milliliter", ""), ("dB", "decibel", ""), ("px", "pixel", ""),
        ("fps", "frame per second", "frames per second"), ("mph", "mile per hour", "miles per hour"),
        ("FLOPS", "flops", "flops"), ("GFLOPS", "gigaflops", "gigaflops"), ("TFLOPS", "teraflops", "teraflops"),
        ("GFLOP", "gigaflop", ""), ("TFLOP", "teraflop", ""), ("tok", "token", ""), ("token", "token", ""),
        ("tokens", "token", ""), ("req", "request", ""), ("%", "percent", "percent"),
        ("°C", "degree Celsius", "degrees Celsius"), ("°F", "degree Fahrenheit", "degrees Fahrenheit"),
        ("°", "degree", ""),
    )
}  # fmt: skip
_PER = {
    "s": "second", "sec": "second", "ms": "millisecond", "min": "minute", "h": "hour", "day": "day", "week": "week",
    "month": "month", "year": "year", "tok": "token", "token": "token", "pass": "pass", "core": "core",
    "kg": "kilogram",
    "km": "kilometer", "m": "meter", "W": "watt", "cycle": "cycle",
}  # fmt: skip
_ONE_LETTER = frozenset(unit for unit in _UNITS if len(unit) == 1 and unit.isalpha())


def _one_of(words: object) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))  # type: ignore[call-overload]


_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_WITH_UNIT = re.compile(
    rf"(?<![\w.])([-−]?)({_NUMBER})([ \u00a0\u202f\u2009-]?)({_one_of(_UNITS)})(?:/({_one_of(_PER)}))?(?![\w/²³])"
)
_UNIT_ALONE = re.compile(
    rf"(?<![\w.])(tok|{_one_of(u for u in _UNITS if len(u) > 1 and u.isalpha())})/({_one_of(_PER)})(?!\w)"
)
_THOUSANDS = re.compile(r"(?<=\d)[\u00a0\u202f\u2009'’](?=\d{3}(?!\d))")
_LONG_INTEGER = re.compile(r"\d(?:,?\d){15,}")
_DECIMAL = r"\d[\d,]*(?:\.\d+)?"
_DASH_BETWEEN = re.compile(rf"(?<![\w.-])({_DECIMAL}) ([-−–]) (?=({_DECIMAL}))")
_DASH_AT_BRACKET = re.compile(r"(?<=\)) [-−–] (?=[\d(])|(?<=\d) [-−–] (?=\()")
_DIFFERENCE = re.compile(rf"(?<![\w.-])({_DECIMAL})[-−](?={_DECIMAL}\s*=)")
_SLASH_BETWEEN = re.compile(rf"(?<![\w./])({_DECIMAL})( ?)/\2(?=({_DECIMAL})(?![\w/]))")
_OPERATOR_BEFORE, _OPERATOR_AFTER = re.compile(r"[=≈+×*^]\s*$"), re.compile(r"\s*[=≈+×*^]")
_PHONE = re.compile(r"(?:\b(?:call|dial|fax|phone|tel)\b\D{0,12}(?:\d{3}-)?|\(\d{3}\) ?)$", re.IGNORECASE)
_ABOUT = re.compile(r"~(?=\s?[$€£]?\d)")
_RANGE = re.compile(r"(?<![\w.-])(\d[\d,]*(?:\.\d+)?)\s?[–—]\s?(?=\d)")
_HYPHEN_RANGE = re.compile(r"(?<![\w.-])(\d{1,4})-(\d{1,4})(?![\w-]|\.\d)")
_TIMES = re.compile(r"(?<=\d)\s?[×✕](?!\s?\d)")
_FACTOR_X = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)x(?!\w)")
_BETWEEN = re.compile(r"(?<=[\w)])\s?[×✕·⋅](?=\s?[\w(])|(?<=[\d\s)])\*(?=[\s\d(])")
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?)0*(\d{1,3})(?!\w)")
_POWER = re.compile(r"(?<=[\w)])\s?\^\s?\(?([-−]?\w+)\)?")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_RAISED = re.compile(r"(?<=[\w)])([⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)")
_VERSION = re.compile(r"(?<!\w)v(\d+(?:\.\d+)+)(?!\w)")
_LONG_VERSION = re.compile(r"(?<![\w.])(\d+(?:\.\d+){2,})(?![\w.]\w)")
_MINUS = re.compile(r"(?<![\w)])\s?[-−](?=\d)|−")
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([kM])(?!\w)")
_WORD_SLASH = re.compile(r"(?<=[A-Za-z])/(?=[A-Za-z])")
_NAME_PARTS = re.compile(r"(?<=\w)_(?=\w)")
_HASH = re.compile(r"(?<![\w&])#(?=\d)")
_PLUS_PLUS = re.compile(r"(?<=[A-Za-z])\+\+(?!\w)")
_LESS = re.compile(r"(?<=\s)<(?=\s)|(?<=\w)\s?<\s?(?=\d)")
_GREATER = re.compile(r"(?<=\s)>(?=\s)|(?<=\w)\s?>\s?(?=\d)")
_WORDS_RANGE = re.compile(r"(?<=\w)\s?–\s?(?=\d)")
_OPTION = re.compile(r"(?<![\w-])--(?=[A-Za-z])")
_SHARP = re.compile(r"(?<!\w)([A-G])#(?!\w)")
_LEFT_OVER = re.compile(r"[<>#*]")
_SYMBOLS = (
    ("<=>", " "), ("===", " equals "), ("!==", " is not "), ("==", " equals "), ("!=", " is not "), ("≠", " is not "),
    ("<=", " at most "), (">=", " at least "), ("≤", " at most "), ("≥", " at least "), ("->", " to "), ("=>", " to "),
    ("⇒", ", so "), ("→", " to "), ("↔", " and "), ("≈", " about "), ("~", " "), ("±", " plus or minus "),
    ("÷", " divided by "), ("√", " square root of "), ("∞", " infinity "), ("&", " and "), ("=", " equals "),
    ("µ", "micro"), ("°", " degrees "), ("½", " one half "), ("¼", " one quarter "), ("¾", " three quarters "),
    ("@", " at "), ("|", ", "), ("\\", " "), ("`", ""), ("^", " "), ("[", ""), ("]", ""), ("{", ""), ("}", ""),
    ("…", "..."), ("%", " percent"),
)  # fmt: skip
_GREEK = dict(zip("αβγδεζηθικλμνξοπρστυφχψω", (
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi",
    "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
), strict=True)) | {"Δ": "delta", "Σ": "sigma", "Ω": "omega", "Π": "pi", "Φ": "phi", "Θ": "theta"}  # fmt: skip
_GREEK_LETTER = re.compile(rf"(?<![\u0370-\u03ff])[{''.join(_GREEK)}](?![\u0370-\u03ff])")


def spoken_symbols(text: str) -> str:
    """Return `text` with units, operators and symbols as words: `63 GB/s` as "63 gigabytes per second"."""
    text = text.replace("μ", "µ") if re.search(r"\dμ| μ[smgl]\b", text) else text
    text = _THOUSANDS.sub("", text)
    text = _VERSION.sub(lambda match: f"version {match[1].replace('.', ' point ')}", text)
    text = _LONG_VERSION.sub(lambda match: match[1].replace(".", " point "), text)
    text = _EXPONENT.sub(_scientific, text)
    text = _LONG_INTEGER.sub(lambda match: " ".join(match[0].replace(",", "")), text)
    text = _DASH_BETWEEN.sub(_minus_or_to, text)
    text = _DIFFERENCE.sub(r"\1 minus ", _DASH_AT_BRACKET.sub(" minus ", text))
    text = _SLASH_BETWEEN.sub(_over, text)
    text = _RANGE.sub(r"\1 to ", text)
    text = _HYPHEN_RANGE.sub(_range, text)
    text = _WITH_UNIT.sub(_unit, text)
    text = _WORDS_RANGE.sub(" to ", _OPTION.sub("", text))
    text = _UNIT_ALONE.sub(lambda match: f"{_UNITS[match[1]][1]} per {_PER[match[2]]}", text)
    text = _TIMES.sub(" times", _FACTOR_X.sub(r"\1 times", text))
    text = _BETWEEN.sub(" times ", text)
    text = _SIZE.sub(lambda match: f"{match[1]} {'thousand' if match[2] == 'k' else 'million'}", text)
    text = _RAISED.sub(lambda match: _power(match[1].translate(_SUPERSCRIPTS)), text)
    text = _POWER.sub(lambda match: _power(match[1]), text)
    text = _MINUS.sub(" minus ", text)
    text = _SHARP.sub(r"\1 sharp", text)
    text = _PLUS_PLUS.sub(" plus plus", re.sub(r"(?<=[\w)\s])\+(?=[\s\d])", " plus ", text))
    text = _ABOUT.sub(" about ", text)
    for symbol, words in _SYMBOLS:
        if symbol in text:
            text = text.replace(symbol, words)
    text = _GREATER.sub(" greater than ", _LESS.sub(" less than ", text))
    text = _GREEK_LETTER.sub(lambda match: f" {_GREEK[match[0]]} ", text)
    text = _HASH.sub("number ", text)
    return _LEFT_OVER.sub(" ", _NAME_PARTS.sub(" ", _WORD_SLASH.sub(" ", text)))


def _minus_or_to(match: re.Match[str]) -> str:
    """Return a dash between two numbers as "to" where they rise and nothing is calculated, else as "minus"."""
    low, dash, high = match.groups()
    rises = float(low.replace(",", "")) < float(high.replace(",", ""))
    return f"{low} {'to' if rises and dash != '−' and '=' not in match.string else 'minus'} "


def _range(match: re.Match[str]) -> str:
    if len(match[1]) == 3 and len(match[2]) == 4 and _PHONE.search(match.string[: match.start()]):
        return match[0]
    return f"{match[1]} to {match[2]}"


def _over(match: re.Match[str]) -> str:
    """Return a division as words; a fraction or a date stays for the voice."""
    before, after = match.string[: match.start()], match.end() + len(match[3])
    calculated = match[2] or _OPERATOR_BEFORE.search(before) or _OPERATOR_AFTER.match(match.string, after)
    return f"{match[1]} over " if calculated else match[0]


def _unit(match: re.Match[str]) -> str:
    sign, number, gap, unit, per = match.groups()
    if not gap and unit in _ONE_LETTER and (unit != "s" or _is_decade(number)):
        return match[0]  # 7B, 5V, the 1990s
    if gap == "-" and unit in _ONE_LETTER:
        return match[0]
    one, many = _UNITS[unit]
    minus = "minus " if sign else ""
    name = one if number == "1" or gap == "-" else many
    if unit == "MT" and not per:
        return match[0]
    return f"{minus}{number} {name}" + (f" per {_PER[per]}" if per else "")


def _is_decade(number: str) -> bool:
    return "." not in number and number.endswith("0") and len(number) in (2, 4)


def _scientific(match: re.Match[str]) -> str:
    sign = "minus " if match[2] == "-" else ""
    return f"{match[1]} times 10 to the {sign}{match[3]}"


def _power(exponent: str) -> str:
    if exponent in ("2", "3"):
        return " squared" if exponent == "2" else " cubed"
    return f" to the power of {exponent.replace('-', 'minus ').replace('−', 'minus ')}"
