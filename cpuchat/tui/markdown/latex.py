"""Shows simple LaTeX formulas as Unicode: `$x_1^2 \\le \\frac{a}{b+1}$` as x₁² ≤ a/(b+1).

A formula with anything that is not known here stays as it was written: that is better to read than half of it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from html.entities import html5

_DELIMITERS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|\s+|.", re.DOTALL)
_DEEPEST = 20  # groups in groups


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SYMBOLS = {
    "epsilon": "ϵ", "varepsilon": "ε", "phi": "ϕ", "varphi": "φ", "cdot": "⋅", "ast": "∗", "star": "⋆", "circ": "∘",
    "land": "∧", "lor": "∨", "neg": "¬", "lnot": "¬", "iint": "∬", "partial": "∂", "neq": "≠", "models": "⊨",
    "to": "→", "gets": "←", "implies": "⟹", "impliedby": "⟸", "iff": "⟺", "infty": "∞", "exists": "∃",
    "triangle": "△", "blacksquare": "■", "degree": "°", "dots": "…", "ldots": "…", "cdots": "⋯", "vdots": "⋮",
    "ddots": "⋱", "lvert": "|", "rvert": "|", "lVert": "‖", "rVert": "‖", "quad": "  ", "qquad": "    ",
    "backslash": "\\",
}  # fmt: skip
"""Symbols that HTML names otherwise, or not at all; all others have the names of HTML's entities."""
_MARKS_OVER = _names("acute breve check grave not")  # entities of these names are other things
_ESCAPED = {
    "\\{": "{", "\\}": "}", "\\%": "%", "\\$": "$", "\\#": "#", "\\_": "_", "\\&": "&", "\\|": "‖", "\\,": " ",
    "\\;": " ", "\\:": " ", "\\ ": " ", "\\!": "", "~": " ", "'": "′", "\\\\": "\n",
}  # fmt: skip
_FUNCTIONS = _names(
    "arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom inf ker lg lim liminf limsup ln log max min"
    " Pr sec sin sinh sup tan tanh mod"
)
_IGNORED = _names(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle limits nolimits"
    " nonumber notag"
)
_PLAIN = _names("mathrm mathbf mathit mathsf mathcal mathfrak boldsymbol bm boxed")
_TEXTS = _names("text textbf textit textrm texttt mbox")
_FRACTIONS = _names("frac dfrac tfrac")
_ENVIRONMENTS = _names("align align* aligned equation equation* gather gather* gathered split")
_ACCENTS = {"hat": "\u0302", "widehat": "\u0302", "bar": "\u0304", "overline": "\u0305", "tilde": "\u0303",
            "vec": "\u20d7", "dot": "\u0307", "ddot": "\u0308"}  # fmt: skip
_DOUBLE_STRUCK = str.maketrans("CEFHNPQRZ1", "ℂ𝔼𝔽ℍℕℙℚℝℤ𝟙")
_BIG = frozenset("∑∏∐∫∬∭∮⋃⋂⨁⨂")
_ROOTS = {"": "√", "2": "√", "3": "∛", "4": "∜"}
_VULGAR = {"1/2": "½", "1/3": "⅓", "2/3": "⅔", "1/4": "¼", "3/4": "¾"}
_RAISED = (
    dict(zip("0123456789+-=()", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾", strict=True))
    | dict(zip("abcdefghijklmnoprstuvwxyz", "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ", strict=True))
    | dict(zip("T∘°⊤′*∗†", "ᵀ°°ᵀ′**†", strict=True))
)
_LOWERED = dict(zip("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ", strict=True))
_MARKS = "′°\u0300-\u036f\u20d7⁺⁻⁼₊₋₌"
_FACTORS = re.compile(rf"(?:[\w.{_MARKS}∂∇∞√]|\([^()]*\))+")  # that need no parentheses over a fraction line
_FACTOR = re.compile(rf"\d[\d.]*|[d∂]?[^\W\d_][{_MARKS}⁰-ₜ²³¹ᵃ-ᶻ]*|\([^()]*\)")  # and under it, or under a root
_NAME = re.compile(r"[^\W\d_]{2,}")

Part = tuple[str, str]
"""A text and its kind: "script", "fraction", "function", "operator" or ""."""


class _UnknownError(Exception):
    """Something that is not known here."""


@lru_cache(maxsize=512)
def unicode_math(source: str) -> str | None:
    """Return a formula, which has its delimiters, as Unicode; None if it has anything that is not known here."""
    opening, closing = next((pair for pair in _DELIMITERS if source.startswith(pair[0])), ("", ""))
    body = source.removeprefix(opening).removesuffix(closing).strip()
    if opening == "$" and not re.search(r"[\\^_]", body) and _NAME.search(body):
        return None  # rather names of variables in a shell: $HOME/$USER
    try:
        shown = _Reader(body).read()
    except _UnknownError:
        return None
    lines = [" ".join(line.split()) for line in shown.split("\n")]
    return "\n".join(filter(None, lines)) or None


class _Reader:
    """Reads a formula once, from left to right. Each method raises `_UnknownError`."""

    def __init__(self, body: str) -> None:
        self._tokens: list[str] = _TOKEN.findall(body)
        self._at = 0
        self._depth = 0

    def read(self) -> str:
        shown = self._sequence("")
        if self._at < len(self._tokens):
            raise _UnknownError  # a closing brace without its opening one
        return shown

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _sequence(self, end: str) -> str:
        """Read up to the token `end`, and that; "": to the end of the formula."""
        self._go_deeper()
        parts: list[Part] = []
        while self._peek() not in ("", "}", end):
            parts.append(self._part())
        if end and self._next() != end:
            raise _UnknownError
        self._depth -= 1
        return _joined(parts)

    def _go_deeper(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _UnknownError

    def _part(self) -> Part:
        token = self._next()
        if token.isspace():
            return "\n" if "\n" in token else " ", ""
        if token in _ESCAPED:
            return _ESCAPED[token], ""
        if token == "{":
            return self._sequence("}"), ""
        if token == "^":
            return self._script("^", _RAISED), "script"
        if token == "_":
            return self._script("_", _LOWERED), "script"
        if token == "&":  # aligns the lines
            return "", ""
        if token == "$":
            raise _UnknownError
        return self._command(token[1:]) if token[0] == "\\" else (token, "")

    def _argument(self) -> str:
        while self._peek().isspace():
            self._next()
        if self._peek() in ("", "}"):
            raise _UnknownError
        self._go_deeper()
        argument = self._part()[0].strip()
        self._depth -= 1
        return argument

    def _script(self, mark: str, forms: dict[str, str]) -> str:
        script = self._argument()
        compact = script.replace(" ", "")
        if all(char in forms for char in compact):
            return "".join(forms[char] for char in compact)
        is_name = len(script) == 1 or (mark == "_" and script.isalnum())
        return f"{mark}{script}" if is_name else f"{mark}({script})"

    def _command(self, name: str) -> Part:
        if name in _FUNCTIONS:
            return name, "function"
        if name in _IGNORED:
            if name in ("left", "right") and self._peek() == ".":
                self._next()
            return "", ""
        if name in _PLAIN:
            return self._argument(), ""
        if name in _TEXTS:
            return self._verbatim(), ""
        if name in _FRACTIONS:
            over, under = self._argument(), self._argument()
            shown = f"{_enclosed(over, _FACTORS)}/{_enclosed(under, _FACTOR)}"
            return _VULGAR.get(shown, shown), "" if shown in _VULGAR else "fraction"
        if name in _ACCENTS:
            if len(letter := self._argument()) != 1:
                raise _UnknownError
            return letter + _ACCENTS[name], ""
        if symbol := _SYMBOLS.get(name) or (name not in _MARKS_OVER and html5.get(f"{name};")):
            return symbol, "operator" if symbol in _BIG else ""
        return self._rare_command(name)

    def _rare_command(self, name: str) -> Part:
        match name:
            case "sqrt":
                index = self._sequence("]") if self._peek() == "[" and self._next() else ""
                if index not in _ROOTS:
                    raise _UnknownError
                return _ROOTS[index] + _enclosed(self._argument(), _FACTOR), ""
            case "mathbb":
                return self._argument().translate(_DOUBLE_STRUCK), ""
            case "operatorname" | "operatorname*":
                return self._argument(), "function"
            case "pmod":
                return f" (mod {self._argument()})", ""
            case "bmod":
                return " mod ", ""
            case "tag":
                return f"  ({self._argument()})", ""
            case "begin" | "end" if self._verbatim() in _ENVIRONMENTS:
                return "", ""
            case _:
                raise _UnknownError

    def _verbatim(self) -> str:
        if self._next() != "{":
            raise _UnknownError
        shown = ""
        while (token := self._next()) != "}":
            if token in ("", "{", "$") or (token[0] == "\\" and token not in _ESCAPED):
                raise _UnknownError
            shown += _ESCAPED.get(token, token) if token[0] == "\\" else token
        return shown


def _enclosed(text: str, simple: re.Pattern[str]) -> str:
    return text if simple.fullmatch(text) else f"({text})"


def _joined(parts: list[Part]) -> str:
    """Join parts, with spaces around functions, and parentheses around fractions that something follows directly."""
    shown, base = "", ""
    for at, (text, kind) in enumerate(parts):
        after, after_kind = parts[at + 1] if at + 1 < len(parts) else ("", "")
        if kind == "fraction":
            touched = shown[-1:].isalnum() or shown.endswith(")") or after_kind == "script"
            if touched or after[:1].isalnum() or after.startswith(("(", "√")):
                text = f"({text})"
        elif kind != "script":
            follows = base in ("function", "operator") and text[:1].isalnum()
            if (follows or kind == "function") and shown[-1:].strip():
                shown += " " if follows or shown[-1:].isalnum() else ""
        shown += text
        if kind != "script":
            base = kind
    return shown
