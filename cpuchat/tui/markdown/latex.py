"""Shows simple LaTeX formulas as Unicode: `$x_1^2 \\le \\frac{a}{b+1}$` as x₁² ≤ a/(b+1).

A formula with anything that is not known here stays as it was written: that is better to read than half of it.
"""

from __future__ import annotations

import re
from functools import lru_cache

from rich.cells import cell_len

_DELIMITERS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|\s+|.", re.DOTALL)
_DEEPEST = 20  # groups in groups
_BLANK = "\u00a0"  # columns stay where they are when lines are wrapped


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SYMBOLS = {
    # Greek
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "varepsilon": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "vartheta": "ϑ", "iota": "ι", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ",
    "pi": "π", "varpi": "ϖ", "rho": "ρ", "varrho": "ϱ", "sigma": "σ", "varsigma": "ς", "tau": "τ", "upsilon": "υ",
    "phi": "ϕ", "varphi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ",
    "Lambda": "Λ", "Xi": "Ξ", "Pi": "Π", "Sigma": "Σ", "Upsilon": "Υ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω",
    # Operators
    "cdot": "⋅", "times": "×", "div": "÷", "pm": "±", "mp": "∓", "ast": "∗", "star": "⋆", "circ": "∘", "bullet": "•",
    "oplus": "⊕", "ominus": "⊖", "otimes": "⊗", "odot": "⊙", "cap": "∩", "cup": "∪", "setminus": "∖", "wedge": "∧",
    "land": "∧", "vee": "∨", "lor": "∨", "neg": "¬", "lnot": "¬", "sum": "∑", "prod": "∏", "coprod": "∐", "int": "∫",
    "iint": "∬", "iiint": "∭", "oint": "∮", "bigcup": "⋃", "bigcap": "⋂", "bigoplus": "⨁", "bigotimes": "⨂",
    "partial": "∂", "nabla": "∇", "dagger": "†", "top": "⊤", "bot": "⊥", "perp": "⊥",
    # Relations and arrows
    "le": "≤", "leq": "≤", "leqslant": "⩽", "ge": "≥", "geq": "≥", "geqslant": "⩾", "ne": "≠", "neq": "≠", "ll": "≪",
    "gg": "≫", "lt": "<", "gt": ">", "approx": "≈", "sim": "∼", "simeq": "≃", "cong": "≅", "equiv": "≡", "propto": "∝",
    "in": "∈", "notin": "∉", "ni": "∋", "subset": "⊂", "subseteq": "⊆", "supset": "⊃", "supseteq": "⊇", "mid": "∣",
    "parallel": "∥", "models": "⊨", "vdash": "⊢", "prec": "≺", "succ": "≻", "to": "→", "rightarrow": "→", "gets": "←",
    "leftarrow": "←", "leftrightarrow": "↔", "Rightarrow": "⇒", "Leftarrow": "⇐", "Leftrightarrow": "⇔",
    "implies": "⟹", "impliedby": "⟸", "iff": "⟺", "longrightarrow": "⟶", "mapsto": "↦", "uparrow": "↑",
    "downarrow": "↓", "hookrightarrow": "↪", "rightharpoonup": "⇀",
    # The rest
    "infty": "∞", "forall": "∀", "exists": "∃", "nexists": "∄", "emptyset": "∅", "varnothing": "∅", "therefore": "∴",
    "because": "∵", "angle": "∠", "triangle": "△", "square": "□", "blacksquare": "■", "checkmark": "✓", "hbar": "ℏ",
    "ell": "ℓ", "Re": "ℜ", "Im": "ℑ", "aleph": "ℵ", "prime": "′", "degree": "°", "dots": "…", "ldots": "…",
    "cdots": "⋯", "vdots": "⋮", "ddots": "⋱", "langle": "⟨", "rangle": "⟩", "lfloor": "⌊", "rfloor": "⌋",
    "lceil": "⌈", "rceil": "⌉", "lvert": "|", "rvert": "|", "vert": "|", "lVert": "‖", "rVert": "‖", "Vert": "‖",
    "lbrace": "{", "rbrace": "}", "colon": ":", "quad": "  ", "qquad": "    ", "backslash": "\\",
}  # fmt: skip
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
_MATRICES = {
    "matrix": ("", ""), "smallmatrix": ("", ""), "array": ("", ""), "pmatrix": ("⎛⎜⎝(", "⎞⎟⎠)"),
    "bmatrix": ("⎡⎢⎣[", "⎤⎥⎦]"),
    "Bmatrix": ("⎧⎨⎩{", "⎫⎬⎭}"), "vmatrix": ("││││", "││││"), "Vmatrix": ("‖‖‖‖", "‖‖‖‖"), "cases": ("⎧⎨⎩{", ""),
}  # fmt: skip
"""Opening and closing brackets: of the first row, of those between, of the last, and of a single one."""
_HELD = "\x00"  # stands for a matrix in a line; cleaned text has none
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


Matrix = tuple[str, list[list[str]]]
"""Its environment, and its rows of cells."""


class _UnknownError(Exception):
    """Something that is not known here."""


@lru_cache(maxsize=512)
def unicode_math(source: str) -> str | None:
    """Return a formula, which has its delimiters, as Unicode; None if it has anything that is not known here."""
    opening, closing = next((pair for pair in _DELIMITERS if source.startswith(pair[0])), ("", ""))
    body = source.removeprefix(opening).removesuffix(closing).strip()
    if opening == "$" and not re.search(r"[\\^_]", body) and _NAME.search(body):
        return None  # rather names of variables in a shell: $HOME/$USER
    reader = _Reader(body)
    try:
        shown = reader.read()
    except _UnknownError:
        return None
    lines = [" ".join(line.split()) for line in shown.split("\n")]
    if reader.matrices:
        matrices = iter(reader.matrices)
        draw = _drawn if opening in ("$$", "\\[") else _in_line
        lines = [draw(line, [next(matrices) for _ in range(line.count(_HELD))]) for line in lines]
    return "\n".join(filter(None, lines)) or None


class _Reader:
    """Reads a formula once, from left to right. Each method raises `_UnknownError`."""

    def __init__(self, body: str) -> None:
        self.matrices: list[Matrix] = []
        """In the order of `_HELD` in what is read."""
        self._tokens: list[str] = _TOKEN.findall(body.replace(_HELD, ""))
        self._at = 0
        self._depth = 0
        self._in_matrix = False

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
        if symbol := _SYMBOLS.get(name):
            return symbol, "operator" if symbol in _BIG else ""
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
        if name in _ACCENTS and len(letter := self._argument()) == 1:
            return letter + _ACCENTS[name], ""
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
            case "begin":
                return self._environment(self._verbatim()), ""
            case "end" if self._verbatim() in _ENVIRONMENTS:
                return "", ""
            case _:
                raise _UnknownError

    def _environment(self, name: str) -> str:
        if name in _ENVIRONMENTS:
            return ""
        if name not in _MATRICES or self._in_matrix:
            raise _UnknownError
        self._in_matrix = True
        if name == "array":
            self._verbatim()  # how its columns are aligned
        self._go_deeper()
        rows: list[list[str]] = []
        self.matrices.append((name, rows))
        row: list[str] = []
        parts: list[Part] = []
        while (token := self._peek()) not in ("", "}"):
            if token not in ("&", "\\\\", "\\end"):
                parts.append(self._part())
                continue
            self._next()
            row.append(" ".join(_joined(parts).split()))
            parts = []
            if token == "&":
                continue
            if token == "\\\\" or row != [""]:  # the last row may end with \\ too
                rows.append(row)
            row = []
            if token == "\\end":
                if self._verbatim() != name or not rows:
                    raise _UnknownError
                self._depth -= 1
                self._in_matrix = False
                return _HELD
        raise _UnknownError

    def _verbatim(self) -> str:
        """Read a group that is text."""
        if self._next() != "{":
            raise _UnknownError
        shown = ""
        while (token := self._next()) != "}":
            if token in ("", "{", "$") or (token[0] == "\\" and token not in _ESCAPED):
                raise _UnknownError
            shown += _ESCAPED.get(token, token) if token[0] == "\\" else token
        return shown


def _in_line(line: str, matrices: list[Matrix]) -> str:
    """Return a line with its matrices between the words: `(1, 2; 3, 4)`."""
    for name, rows in matrices:
        opening, closing = (bracket[3:] for bracket in _MATRICES[name])
        line = line.replace(_HELD, f"{opening}{'; '.join(', '.join(row) for row in rows)}{closing}", 1)
    return line


def _drawn(line: str, matrices: list[Matrix]) -> str:
    """Draw a line with its matrices over several lines; what stands beside a matrix is in its middle."""
    height = max((len(rows) for _, rows in matrices), default=1)
    texts = line.split(_HELD)
    blocks = [[texts[0]]]
    for matrix, text in zip(matrices, texts[1:], strict=True):
        blocks += [_block(*matrix), [text]]
    lines = [""] * height
    for block in blocks:
        above, width = (height - len(block)) // 2, cell_len(block[0])
        for at in range(height):
            lines[at] += block[at - above] if 0 <= at - above < len(block) else _BLANK * width
    return "\n".join(one.rstrip() for one in lines)


def _block(name: str, rows: list[list[str]]) -> list[str]:
    """Draw a matrix, each column as wide as its widest cell."""
    n_columns = max(map(len, rows))
    cells = [[*row, *[""] * (n_columns - len(row))] for row in rows]
    widths = [max(cell_len(row[at]) for row in cells) for at in range(n_columns)]
    drawn: list[str] = []
    for at, row in enumerate(cells):
        edge = 3 if len(rows) == 1 else 0 if at == 0 else 2 if at == len(rows) - 1 else 1
        opening, closing = (bracket[edge : edge + 1] for bracket in _MATRICES[name])
        inside = (_BLANK * 2).join(_centered(cell, width, name) for cell, width in zip(row, widths, strict=True))
        drawn.append(f"{opening}{inside}{closing}")
    return drawn


def _centered(cell: str, width: int, name: str) -> str:
    left = 0 if name in ("cases", "array") else (width - cell_len(cell) + 1) // 2
    return f"{_BLANK * left}{cell.replace(' ', _BLANK)}{_BLANK * (width - cell_len(cell) - left)}"


def _enclosed(text: str, simple: re.Pattern[str]) -> str:
    """Put parentheses around what is not as `simple`."""
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
