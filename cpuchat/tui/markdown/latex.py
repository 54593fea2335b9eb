"""Shows simple LaTeX formulas as Unicode: `$x_1^2 \\le \\frac{a}{b+1}$` as x₁² ≤ a/(b+1).

A formula with anything that is not known here stays as it was written: that is better to read than half of it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from html.entities import html5

_DELIMITERS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
_DEEPEST = 20  # groups in groups
_BEFORE, _AFTER = "\ue000", "\ue001"  # stand around names of functions: where letters touch them, spaces do
_LITERAL = {"{": "\ue002", "}": "\ue003", "_": "\ue004", "^": "\ue005", "$": "\ue006", "\\": "\ue007",
            "&": "\ue008", "'": "\ue009"}  # fmt: skip
"""Characters that are shown, and no markup."""
_SHOWN = str.maketrans({mark: char for char, mark in _LITERAL.items()})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SYMBOLS = {
    "epsilon": "ϵ", "varepsilon": "ε", "phi": "ϕ", "varphi": "φ", "cdot": "⋅", "ast": "∗", "star": "⋆", "circ": "∘",
    "land": "∧", "lor": "∨", "neg": "¬", "lnot": "¬", "iint": "∬", "partial": "∂", "neq": "≠", "models": "⊨",
    "to": "→", "gets": "←", "implies": "⟹", "impliedby": "⟸", "iff": "⟺", "infty": "∞", "exists": "∃",
    "triangle": "△", "blacksquare": "■", "degree": "°", "dots": "…", "ldots": "…", "cdots": "⋯", "vdots": "⋮",
    "ddots": "⋱", "lvert": "|", "rvert": "|", "lVert": "‖", "rVert": "‖", "quad": "  ", "qquad": "    ",
    "bmod": " mod ", "backslash": _LITERAL["\\"],
}  # fmt: skip
"""Symbols that HTML names otherwise, or not at all; all others have the names of HTML's entities."""
_ESCAPED = {
    "%": "%", "#": "#", "|": "‖", ",": " ", ";": " ", ":": " ", " ": " ", "!": "", "\\": "\n",
    **{char: _LITERAL[char] for char in "{}$_&"},
}  # fmt: skip
_FUNCTIONS = _names(
    "arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom inf ker lg lim liminf limsup ln log max min"
    " Pr sec sin sinh sup tan tanh mod"
)
_IGNORED = _names(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle limits nolimits"
    " nonumber notag"
)
_NO_SYMBOLS = _names("acute breve check grave not hat tilde bar dot vec")  # but entities of these names
_PLAIN = "mathrm mathbf mathit mathsf mathcal mathfrak boldsymbol bm boxed text textbf textit textrm texttt mbox"
_AROUND = {
    **dict.fromkeys(_PLAIN.split(), "*"), "pmod": " (mod *)", "tag": "  (*)", "operatorname": f"{_BEFORE}*{_AFTER}",
}  # fmt: skip
"""What a command makes of its argument, the asterisk."""
_ENVIRONMENTS = _names("align align* aligned equation equation* gather gather* gathered split")
_ACCENTS = {"hat": "\u0302", "widehat": "\u0302", "bar": "\u0304", "overline": "\u0305", "tilde": "\u0303",
            "vec": "\u20d7", "dot": "\u0307", "ddot": "\u0308"}  # fmt: skip
_DOUBLE_STRUCK = str.maketrans("CEFHNPQRZ1", "ℂ𝔼𝔽ℍℕℙℚℝℤ𝟙")
_BIG = frozenset("∑∏∐∫∬∭∮⋃⋂⨁⨂")
_ROOTS = {None: "√", "2": "√", "3": "∛", "4": "∜"}
_RAISED = (
    dict(zip("0123456789+-=()", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾", strict=True))
    | dict(zip("abcdefghijklmnoprstuvwxyz", "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ", strict=True))
    | dict(zip("T∘°⊤′*∗†", "ᵀ°°ᵀ′**†", strict=True))
)
_LOWERED = dict(zip("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ", strict=True))
_SCRIPTS = re.escape("".join((*_RAISED.values(), *_LOWERED.values())))
_MARKS = "′°\u0300-\u036f\u20d7⁺⁻⁼₊₋₌"
_FACTORS = re.compile(rf"(?:[\w.{_MARKS}∂∇∞√]|\([^()]*\))+")  # that need no parentheses over a fraction line
_FACTOR = re.compile(rf"\d[\d.]*|[d∂]?[^\W\d_][{_MARKS}⁰-ₜ²³¹ᵃ-ᶻ]*|\([^()]*\)")  # and under it, or under a root
_NAME = re.compile(r"[^\W\d_]{2,}")
_COMMAND = re.compile(r"\\(?:([A-Za-z]+)|(.))", re.DOTALL)
_DONE = r"[^{}\\_^$]*"  # a text in which nothing is left to be shown
_SINGLE = re.compile(
    r"(\\[dt]?frac(?![A-Za-z])\s*(?:\{[^{}]*\}\s*)?|\\sqrt(?![A-Za-z])\s*(?:\[\d\]\s*)?)([A-Za-z\d\u0391-\u03f5])"
)
"""An argument that is one letter, which may be Greek, or digit, and has no braces."""
_GROUP = re.compile(
    rf"\\[dt]?frac\s*\{{(?P<over>{_DONE})\}}\s*\{{(?P<under>{_DONE})\}}"
    rf"|\\sqrt\s*(?:\[(?P<index>[234])\])?\s*\{{(?P<root>{_DONE})\}}"
    rf"|\\(?P<name>[A-Za-z]+)\*?\s*(?:\{{(?P<of>{_DONE})\}}|(?P<letter>[^\W_]))"
    rf"|(?P<end>{_AFTER}?)(?P<mark>[_^])\s*(?:\{{(?P<script>{_DONE})\}}|(?P<one>[^\s{{}}\\_^$]))"
    rf"|(?<!\}})\{{(?P<plain>{_DONE})\}}"
)


@lru_cache(maxsize=512)
def unicode_math(source: str) -> str | None:
    """Return a formula, which has its delimiters, as Unicode; None if it has anything that is not known here."""
    opening, closing = next((pair for pair in _DELIMITERS if source.startswith(pair[0])), ("", ""))
    body = source.removeprefix(opening).removesuffix(closing).strip()
    if opening == "$" and not re.search(r"[\\^_]", body) and _NAME.search(body):
        return None  # rather names of variables in a shell: $HOME/$USER
    body = re.sub(r"\\(?:left|right)\s*\.", "", body)
    body = re.sub(r"\\(?:text|mbox)[a-z]*\s*\{[^{}]*\}", lambda text: text[0].replace("'", _LITERAL["'"]), body)
    shown = _COMMAND.sub(_symbol, body).replace("&", "").replace("~", " ").replace("'", "′")
    shown = _SINGLE.sub(r"\1{\2}", _SINGLE.sub(r"\1{\2}", shown))
    for _ in range(_DEEPEST):
        if (after := _GROUP.sub(_group, shown)) == shown:
            break
        shown = after
    if re.search(r"[{}\\_^$]", shown):
        return None
    shown = re.sub(f"{_AFTER}([{_SCRIPTS}]+)", rf"\1{_AFTER}", shown)
    shown = re.sub(rf"(?<=[\w)]){_BEFORE}|{_AFTER}(?=\w)", " ", shown)
    shown = shown.replace(_BEFORE, "").replace(_AFTER, "").translate(_SHOWN)
    return "\n".join(filter(None, (" ".join(line.split()) for line in shown.split("\n")))) or None


def _symbol(found: re.Match[str]) -> str:
    """Return what a command without an argument stands for; the command itself if it is none."""
    name, escaped = found.groups()
    if not name:
        return _ESCAPED.get(escaped, found[0])
    if name in _FUNCTIONS:
        return f"{_BEFORE}{name}{_AFTER}"
    if name in _IGNORED:
        return ""
    symbol = _SYMBOLS.get(name) or ("" if name in _NO_SYMBOLS else html5.get(f"{name};", ""))
    return f"{symbol}{_AFTER}" if symbol in _BIG else symbol or found[0]


def _group(found: re.Match[str]) -> str:
    """Return a group of which all parts are shown already, as it is shown; as it is if it is not known."""
    if found["over"] is not None:
        text = f"{_enclosed(found['over'], _FACTORS)}/{_enclosed(found['under'], _FACTOR)}"
        before, after = found.string[found.start() - 1 : found.start()], found.string[found.end() : found.end() + 1]
        touches = before.isalnum() or before == ")" or after.isalnum() or after in ("(", "√", "\\", "_", "^")
        return f"({text})" if touches else text
    if found["root"] is not None:
        return _ROOTS[found["index"]] + _enclosed(found["root"], _FACTOR)
    if found["mark"]:
        script, forms = found["script"] or found["one"] or "", _RAISED if found["mark"] == "^" else _LOWERED
        if all(char in forms for char in script.replace(" ", "")):
            return "".join(forms[char] for char in script.replace(" ", "")) + found["end"]
        is_name = len(script) == 1 or (found["mark"] == "_" and script.isalnum())
        return _LITERAL[found["mark"]] + (script if is_name else f"({script})") + found["end"]
    if found["plain"] is not None:
        return found["plain"]
    name, argument = found["name"], found["of"] if found["of"] is not None else found["letter"]
    if name in _ACCENTS:
        return argument + _ACCENTS[name] if len(argument) == 1 else found[0]
    if name == "mathbb":
        return argument.translate(_DOUBLE_STRUCK)
    if name in ("begin", "end"):
        return "" if argument in _ENVIRONMENTS else found[0]
    return _AROUND[name].replace("*", argument) if name in _AROUND else found[0]


def _enclosed(text: str, simple: re.Pattern[str]) -> str:
    return text if simple.fullmatch(text) else f"({text})"
