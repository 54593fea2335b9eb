"""Divides an answer that is being written into sentences to read aloud, and turns each into words.

Markdown's blocks decide first: code and display formulas are announced and skipped, headings, list items and table rows
are sentences of their own. What is left is prose, divided where a sentence ends. Nothing waits for more text than it
needs: a sentence is handed out with the first character of the next one. Units, operators and symbols that a voice
would swallow or misread become words; plain numbers, years and amounts of money stay digits, which every engine reads.
"""

from __future__ import annotations

import html
import re
import unicodedata
from functools import cache, partial

from cpuchat.base.text import clean

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
    text = _EXPONENT.sub(lambda match: f"{match[1]} times 10 to the {'minus ' * (match[2] == '-')}{match[3]}", text)
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
    is_decade = "." not in number and number.endswith("0") and len(number) in (2, 4)
    is_name = unit in _ONE_LETTER and (gap == "-" or (not gap and (unit != "s" or is_decade)))  # 7B, 5V, the 1990s
    if is_name or (unit == "MT" and not per):
        return match[0]
    one, many = _UNITS[unit]
    minus = "minus " if sign else ""
    name = one if number == "1" or gap == "-" else many
    return f"{minus}{number} {name}" + (f" per {_PER[per]}" if per else "")


def _power(exponent: str) -> str:
    if exponent in ("2", "3"):
        return " squared" if exponent == "2" else " cubed"
    return f" to the power of {exponent.replace('-', 'minus ').replace('−', 'minus ')}"


_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
_CODE = re.compile(r"(`+)(.+?)\1")
_IMAGE = re.compile(r"!\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
_LINK = re.compile(r"\[([^\]]+)\](?:\((?:[^()]|\([^)]*\))*\)|\[[^\]]*\])")
_FOOTNOTE = re.compile(r"\[\^[^\]]+\]:?")
_ADDRESS = re.compile(
    r"<?\b(?:https?|ftp)://(?:www\.)?([^\s/<>()\"'`:]+)[^\s<>\"'`]*?(?=>?[.,;:!?)]*(?:[\s<>\"'`]|$))>?"
)
_DATA = re.compile(r"(?:\bdata:[\w/+.-]+;base64,)?[A-Za-z0-9+/=_-]{80,}")  # an embedded image, a hash
_TAG = re.compile(
    r"</?(?:a|abbr|b|br|center|code|dd|del|details|div|dl|dt|em|font|h[1-6]|hr|i|img|ins|kbd|li|mark|ol|p|pre|q|s|samp|"
    r"small|span|strong|sub|summary|sup|table|tbody|td|th|thead|tr|u|ul)(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_STRONG = re.compile(r"\*\*+|~~|(?<!\w)__+(?=\S)|(?<=\S)__+(?!\w)")
_EMPHASIS = re.compile(r"(?<![\w*])\*(?=[^\s*])|(?<=[^\s*])\*(?![\w*])|(?<!\w)_(?=\S)|(?<=\S)_(?!\w)")
_MARKDOWN_FORMULA = re.compile(r"\\\((.+?)\\\)|(?<![\w$])\$(?=[^\s$\d]|\d[^\s$]*[\\^_=+])([^$\n]*?[^\s$\\])\$(?![\w$])")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_TEX_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|operatorname)\{([^{}]*)\}")
_TEX = {
    "times": "times", "cdot": "times", "le": "at most", "leq": "at most", "ge": "at least", "geq": "at least",
    "neq": "is not", "ne": "is not", "approx": "about", "pm": "plus or minus", "sqrt": "square root of", "to": "to",
    "rightarrow": "to", "infty": "infinity", "sum": "sum of", "int": "integral of", "in": "in", "left": "", "right": "",
    "quad": "", "qquad": "",
}  # fmt: skip
_TEX_WORD = re.compile(r"\\([A-Za-z]+)")
# Variation selectors, ZWJ, the keycap, skin tones.
_OF_EMOJI = re.compile("[\ufe00-\ufe0f\u200d\u20e3\U0001f3fb-\U0001f3ff\U000e0100-\U000e01ef]")
_SPACES = re.compile(r"\s+")
_BEFORE_MARK = re.compile(r"\s+([,.;:!?])")


def spoken_inline(text: str) -> str:
    """Return the words of a sentence: links by their text, addresses by their host, no markup and no emoji."""
    text = unicodedata.normalize("NFC", clean(text)).replace("\n", " ")
    text = _MARKDOWN_FORMULA.sub(lambda match: f" {_formula(match[1] or match[2])} ", text)
    text = _CODE.sub(lambda match: _code(match[2]), text)
    text = _IMAGE.sub(lambda match: f"Image: {match[1]}" if match[1].strip() else "Image", text)
    text = _FOOTNOTE.sub("", _LINK.sub(r"\1", text))
    text = _ADDRESS.sub(lambda match: match[1].replace(".", " dot "), text)
    text = html.unescape(_TAG.sub(" ", _DATA.sub(" ", text)))
    text = _EMPHASIS.sub("", _STRONG.sub("", text))
    text = spoken_symbols(_ESCAPED.sub(r"\1", text))
    text = "".join(character for character in text if not _is_picture(character))
    return _BEFORE_MARK.sub(r"\1", _SPACES.sub(" ", text)).strip()


def _code(text: str) -> str:
    """Return a code span as words: `read_file()` as "read file"."""
    text = re.sub(r"\(\s*\)", "", text)
    text = re.sub(r"(?<=\w)[_/\\](?=\w)", " ", text)
    text = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", text)  # camelCase
    text = re.sub(r"(?<=[A-Za-z])\.(?=[A-Za-z])", " dot ", text)
    text = re.sub(r"(?<![\w-])--?(?=[A-Za-z])", "", text)
    return re.sub(r"[{}\[\]();\"'|*_`]", " ", text)


def _formula(text: str) -> str:
    """Return an inline formula as words, as far as they are known."""
    text = _TEX_TEXT.sub(r" \1 ", text)
    text = _FRACTION.sub(r" \1 over \2 ", text)
    text = _TEX_WORD.sub(lambda match: f" {_TEX.get(match[1], match[1])} ", text)
    text = re.sub(r"\^\{?2\}?", " squared ", text)
    text = re.sub(r"\^\{?3\}?", " cubed ", text)
    text = re.sub(r"\^\{?([^{}\s]+)\}?", r" to the power of \1 ", text)
    return re.sub(r"[{}_\\*]", " ", text)


def _is_picture(character: str) -> bool:
    """Return whether a character has no sound: emoji and what selects or joins them, dingbats, arrows, box drawing."""
    return ord(character) > 0x7F and (
        unicodedata.category(character) in ("So", "Cn", "Co") or _OF_EMOJI.match(character) is not None
    )


MAX_CHARS = 280
"""A sentence that is longer is divided at a comma or a space: it would keep the listener waiting."""
_LONGEST = 4 * MAX_CHARS
"""Where even a text without spaces is divided."""
_SPAN_CHARS = 120
"""A backtick or bracket that is open for longer is none of a code span or link."""

# With a backtick after it, the line is a code span.
_FENCE = re.compile(r"[ \t]*(`{3,}+(?![^`]*`)|~{3,})\s*([\w+#.-]*)")
_HEADING = re.compile(r" {0,3}#{1,6}(?:[ \t]+|$)")
_RULE = re.compile(r" {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,}|=+[ \t]*)$")
_ITEM = re.compile(r"[ \t]*(?:[-*+•]|(\d{1,9})[.)])[ \t]+(?:\[([ xX])\][ \t]+)?")
_QUOTE = re.compile(r" {0,3}(?:>[ \t]?)+")
_TABLE_RULE = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-*:?[ \t]*)*$")
_FORMULA = {"$$": "$$", r"\[": r"\]"}
# What a line may still become as long as it is not complete: nothing is said before that is known.
_UNDECIDED = re.compile(r"[ \t`~$\\|>#=*_+•-]*+(?:\d{1,9}[.)]?[ \t]*)?(?:\[[ xX]?\]?[ \t]*)?[`~$\\]*+$")

# Not from the middle of a run of marks: with that, a long run took quadratic time.
_END = re.compile(r"(?:(?<![.!?…।॥؟۔])[.!?…।॥؟۔]++[\"'”’)\]*_~]*+\s++(?=\S)|[。！？]+[」』”’）]*)")
_ABBREVIATIONS = frozenset([
    "e.g", "i.e", "cf", "vs", "approx", "ca", "al", "dr", "mr", "mrs", "ms", "prof", "st", "gen", "jr", "sr", "eds",
    "resp",
])  # fmt: skip
_BEFORE_NUMBERS = frozenset([
    "no", "nos", "fig", "figs", "eq", "vol", "ch", "sec", "pp", "p", "jan", "feb", "mar", "apr", "jun", "jul", "aug",
    "sep", "sept", "oct", "nov", "dec",
])  # fmt: skip
_BREAKS = (re.compile(r"[;:—–,][\"'”’)\]]*\s"), re.compile(r"\s"))
_LANGUAGES = {
    "py": "Python", "js": "JavaScript", "ts": "TypeScript", "sh": "shell", "zsh": "shell", "console": "shell",
    "cpp": "C plus plus", "c++": "C plus plus", "cs": "C sharp", "c#": "C sharp", "rs": "Rust", "rb": "Ruby",
    "yml": "YAML", "md": "Markdown", "golang": "Go", "tex": "LaTeX", "ps1": "PowerShell",
    "text": "", "txt": "", "plaintext": "", "output": "",
}  # fmt: skip
_SPELLED = frozenset([
    "c", "r", "json", "yaml", "toml", "xml", "html", "css", "sql", "php", "csv", "ini", "asm", "vba",
])  # fmt: skip


class SentenceSplitter:
    """Takes text as it arrives and returns what can be read aloud: the same for any division into pieces."""

    def __init__(self) -> None:
        self._line = ""  # of which no end has come
        self._wait = 0  # characters that it must have before it is looked at again: long ones not for each piece
        self._inside = False  # the block that `_line` belongs to is known: it is prose
        self._prose = ""  # of lines before, without the end of a sentence
        self._fence = ""  # closes the code block
        self._in_quote = False  # that the code block is in
        self._formula = ""  # closes the display formula
        self._in_table = False

    def feed(self, text: str) -> list[str]:
        """Return the sentences that `text` completes."""
        found: list[str] = []
        *lines, rest = (self._line + text.replace("\r\n", "\n")).split("\n")
        for line in lines:
            found += self._complete(line)
        self._line = rest
        self._wait = 0 if lines else self._wait
        return _speakable(found + self._partial())

    def flush(self) -> list[str]:
        """Return what is left at the end of the text."""
        line, self._line = self._line, ""
        found = self._complete(line) + self._end_paragraph()
        self._fence = self._formula = ""
        return _speakable(found)

    def _partial(self) -> list[str]:
        if self._fence or self._formula or len(self._line) < self._wait:
            return []
        if not self._inside:
            self._wait = 2 * len(self._line) if len(self._line) > _LONGEST else 0
            line = self._line
            body = line[_body_of(line) :]
            if _UNDECIDED.match(line.rstrip(" \t")) or line.lstrip().startswith("|") or _HEADING.match(line):
                return []
            if _FENCE.match(body) or _opens(body):
                return []
            before = self._begin_line(line)
            self._line, self._inside, self._wait = "", True, 0
            return before + self._take("")
        text, self._line = self._line, ""
        return self._take(text)

    def _take(self, text: str) -> list[str]:
        """Add prose and return the sentences that are complete now."""
        self._prose += text
        found, self._prose = split_sentences(self._prose)
        return found

    def _complete(self, line: str) -> list[str]:
        """Return the sentences that a complete line, or the rest of one, completes."""
        if self._inside:
            self._inside = False
            return self._take(line + " ") if line or self._prose else []
        if self._fence:
            return self._in_code(line)
        if self._formula:
            _, closed, after = line.partition(self._formula)
            if closed or not line.strip():  # none has an empty line: it was not closed
                self._formula = ""
            return self._after_formula(after)
        if not line.strip():
            return self._end_paragraph()
        if special := self._special(line):
            return special[0]
        return self._begin_line(line) + self._take(" ")

    def _in_code(self, line: str) -> list[str]:
        """Skip a line of code. A block in a quote ends with the quote."""
        quote = _QUOTE.match(line)
        if self._in_quote and quote is None:
            self._fence = ""
            return self._complete(line)
        code = (line[quote.end() :] if self._in_quote and quote is not None else line).strip()
        if code.startswith(self._fence) and not code.strip(self._fence[0]):
            self._fence = ""
        return []

    def _after_formula(self, text: str) -> list[str]:
        """Return the sentences of what follows a display formula in its line."""
        self._prose += text.lstrip(" \t.,;:")
        return self._take(" ") if self._prose else []

    def _special(self, line: str) -> tuple[list[str]] | None:
        """Return the sentences of a line that is no prose, in a tuple of one; None for prose."""
        body = line[_body_of(line) :]
        if match := _FENCE.match(body):
            before = self._end_paragraph()
            self._fence, self._in_quote = match[1], _QUOTE.match(line) is not None
            return ([*before, announce_code(match[2])],)
        if opening := _opens(body):
            _, closed, after = body.strip()[2:].partition(_FORMULA[opening])
            self._formula = "" if closed else _FORMULA[opening]
            return ([*self._end_paragraph(), "Formula.", *self._after_formula(after)],)
        table = self._in_table or line.lstrip().startswith("|")
        if _RULE.match(line) or (table and len(line) < _LONGEST and _TABLE_RULE.match(line)):
            return (self._end_paragraph(keep_table=True),)
        if match := _HEADING.match(line):
            return ([*self._end_paragraph(), _closed(line[match.end() :].rstrip(" \t#"))],)
        if line.lstrip().startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            before = self._end_paragraph(keep_table=True)
            head = "" if self._in_table else "Table: "
            self._in_table = True
            return ([*before, head + _closed(", ".join(cell for cell in cells if cell))],)
        return None

    def _begin_line(self, line: str) -> list[str]:
        """Put the prose of a line that begins into the paragraph; returns what this completes."""
        self._in_table = False
        found: list[str] = []
        if match := _QUOTE.match(line):
            line = line[match.end() :]
        if match := _ITEM.match(line):
            found = self._end_paragraph()
            state = {None: "", " ": "To do: "}.get(match[2], "Done: ")
            line = (f"{match[1]}: " if match[1] else "") + state + line[match.end() :]
        self._prose += line.lstrip()
        return found

    def _end_paragraph(self, *, keep_table: bool = False) -> list[str]:
        self._in_table = self._in_table and keep_table
        text, self._prose = self._prose.strip(), ""
        if not text:
            return []
        found, rest = split_sentences(text)
        return [*found, _closed(rest)] if rest.strip() else found


def split_sentences(text: str) -> tuple[list[str], str]:
    """Return the sentences of `text` that are complete, because another one follows, and the rest.

    Not inside of a code span or of the text of a link, not after abbreviations, initials and before a lowercase letter.
    """
    found: list[str] = []
    start = 0
    clause = cache(partial(_clause, text))

    def divide(end: int) -> int:
        """Return the start of what is left up to `end` when long clauses are off."""
        at = start
        while end - at > MAX_CHARS and (cut := clause(at) or (at + MAX_CHARS if end - at >= _LONGEST else 0)):
            found.append(text[at:cut].strip())
            at = cut
        return at

    for match in _END.finditer(text):
        start = divide(match.end())
        if _is_end(text, start, match):
            found.append(text[start : match.end()].strip())
            start = match.end()
    return found, text[divide(len(text)) :]


def _is_end(text: str, start: int, match: re.Match[str]) -> bool:
    before = text[start : match.start()]
    opened = max(
        before.rfind("`") if before.count("`") % 2 else -1,
        before.rfind("[") if before.count("[") > (before + match[0]).count("]") else -1,
    )
    if opened >= 0 and len(before) - opened < _SPAN_CHARS:
        return False
    if match[0][0] != ".":
        return True
    following = text[match.end()]
    if following.islower():
        return False
    word = before.rsplit(None, 1)[-1].lstrip("([{\"'“‘*_") if before.strip() else ""
    if word.lower() in _ABBREVIATIONS or (word.lower() in _BEFORE_NUMBERS and following.isdigit()):
        return False
    return not (len(word) == 1 and word.isupper() and word != "I")  # an initial


def _clause(text: str, start: int) -> int:
    """Return where to divide a long sentence from `start` on: after a comma or the like, or a space; 0: nowhere."""
    for pattern in _BREAKS:
        ends = [match.end() for match in pattern.finditer(text, start + MAX_CHARS // 3, start + MAX_CHARS)]
        for at in reversed(ends):
            if text.count("`", start, at) % 2 == 0 and text.count("[", start, at) <= text.count("]", start, at):
                return at
    return 0


def announce_code(language: str) -> str:
    """Return what is said in place of a code block."""
    key = language.lower()
    name = _LANGUAGES.get(key, language)
    if key in _SPELLED:
        name = language.upper()
    elif name == language:
        name = language.capitalize()
    return f"Code block, {name}." if name else "Code block."


def _body_of(line: str) -> int:
    """Return where a line begins behind the marks of a quote and of a list item."""
    quote = _QUOTE.match(line)
    start = quote.end() if quote else 0
    item = _ITEM.match(line, start)
    return item.end() if item else start


def _opens(line: str) -> str:
    """Return how a line opens a display formula, "" if it does not."""
    head = line.strip()[:2]
    return head if head in _FORMULA else ""


def _closed(text: str) -> str:
    """Return a heading or an item with an end, so that the voice falls."""
    text = text.strip()
    return text if not text or text.rstrip("*_`)\"'”’ ")[-1:] in ".!?…:;,।॥؟۔。！？" else f"{text}."


def _speakable(raw: list[str]) -> list[str]:
    pieces = [one[at : at + _LONGEST] for one in raw for at in range(0, len(one), _LONGEST)]
    said = [spoken_inline(one) for one in pieces]
    return [one for one in said if any(character.isalnum() for character in one)]
