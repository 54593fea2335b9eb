"""Tests formulas as Unicode, and that others stay as they were written."""

from __future__ import annotations

import unicodedata

import pytest

from cpuchat.tui.markdown.render import render
from cpuchat.tui.markdown.rows import TextStyles


def plain(source: str) -> str:
    text = "\n".join(row.text.rstrip() for row in render(source, 1000, TextStyles()))
    return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("$x_1^2 \\le \\frac{a}{b+1}$", "x₁² ≤ a/(b+1)"),
        ("\\(a_1 \\cdot b_1\\)", "a₁ ⋅ b₁"),
        ("$E = mc^2$ and $n$", "E = mc² and n"),
        ("$O(n\\log n)$", "O(n log n)"),
        ("$\\log_2n + \\sin\\theta$", "log₂ n + sin θ"),
        ("$$\\sum_{i=1}^{n}x_i = \\frac{n(n+1)}{2}$$", "∑ᵢ₌₁ⁿ xᵢ = n(n+1)/2"),
        ("$\\frac{1}{2}mv^2$, $\\frac{1}{5}m$", "(1/2)mv², (1/5)m"),
        ("$\\frac{dy}{dx}$, $\\frac{x}{2a}$", "dy/dx, x/(2a)"),
        ("$\\sqrt{x+1}$, $\\sqrt[3]{x}$", "√(x+1), ∛x"),
        ("$\\sqrt2$, $\\sqrt n$, $\\sqrt[3]2$, $\\sqrt\\pi$", "√2, √n, ∛2, √π"),
        ("$\\frac ab$, $\\frac{a}b$, $\\frac1{x+1}$, $\\frac\\pi2x$", "a/b, a/b, 1/(x+1), (π/2)x"),
        ("$\\left. \\frac{a}{b} \\right|_0$, $\\left\\{ x \\right.$", "a/b |₀, { x"),
        ("$\\text{R\\&D}$, $f' \\text{ isn't } f^2$", "R&D, f′ isn't f²"),
        ("$x \\in \\mathbb{R}^n$, $\\forall \\epsilon > 0$", "x ∈ ℝⁿ, ∀ ϵ > 0"),
        ("$\\left( \\alpha \\right)^{-1}$, $90^\\circ$", "( α )⁻¹, 90°"),
        ("$x_{\\text{max}}$, $A^\\top$, $x_q$, $e^{i\\pi}$", "xₘₐₓ, Aᵀ, x_q, e^(iπ)"),
        ("$f(x) = 1 \\text{ if } x > 0$", "f(x) = 1 if x > 0"),
        ("$\\hat{y} \\approx \\vec v$", "ŷ ≈ v⃗"),
        ("$$\n\\begin{aligned}\na &= b \\\\\n&= c\n\\end{aligned}\n$$", "a = b\n= c"),
        ("$\\boxed{42}$, $50\\%$", "42, 50%"),
        ("- $x^2$", "• x²"),
        ("$5, $10, `$a^2$`", "$5, $10, $a^2$"),
    ],
)
def test_a_simple_formula_is_unicode(source: str, shown: str) -> None:
    assert plain(source) == unicodedata.normalize("NFC", shown)


@pytest.mark.parametrize(
    "source",
    ["$\\mystery{x}$", "$a^{b$", "$a}$", "$\\frac{a}$", "$\\fracab$", "$\\sqrtx$", "$\\sqrt \\mathrm{ab}$",
     "$\\sqrt\\frac12$", "$" + "{" * 40 + "a^2" + "}" * 40 + "$", "$" + "^" * 400 + "x$",
     "$\\text{a $", "$x^$", "$\\tilde{ab}^2$", "$\\not= x$", "$\\begin{pmatrix}a^2\\end{pmatrix}$"],
)  # fmt: skip
def test_a_formula_with_anything_unknown_stays_as_written(source: str) -> None:
    assert plain(source) == source
