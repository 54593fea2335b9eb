"""Published losses by quantization, to compare measured ones with.

They were measured on other texts, mostly Wikitext-2, so they give only the order of magnitude.
"""

from __future__ import annotations

import re

import msgspec

from cpuchat.models.file_names import without_prefix

_PERPLEXITY = "llama.cpp, tools/perplexity/README.md"
_CARD = "model card"


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Published losses of a quantization against F16 or BF16. None: not published.

    `kld_mean` and `kld_999` (the 99.9th percentile) in nats, `same_top` in percent of the tokens, `ppl_delta` as PPL
    minus the base's. `imatrix`: quantized with an importance matrix; None: not stated. `same_family`: it is about the
    model that was asked for, not another one in the same quantization.
    """

    model: str
    quantization: str
    kld_mean: float
    kld_999: float | None = None
    same_top: float | None = None
    ppl_delta: float | None = None
    imatrix: bool | None = None
    source: str
    same_family: bool = False


_LLAMA_3, _LLAMA_2, _QWEN_3, _QWEN_36 = "Llama-3-8B", "Llama-2-7B", "Qwen3-4B-2507", "Qwen3.6-27B"

# In names of files, repositories and headers: "Meta-Llama-3-8B-Instruct", "Llama 2 7B Chat", "llama3:8b". Llama 3.1 and
# Qwen3-4B of April 2025 were retrained and are different models.
_MATCHERS = {
    _LLAMA_3: re.compile(r"llama[-_. ]?3[-_.: ]8b(?![a-z0-9])", re.IGNORECASE),
    _LLAMA_2: re.compile(r"llama[-_. ]?2[-_.: ]7b(?![a-z0-9])", re.IGNORECASE),
    _QWEN_3: re.compile(r"qwen[-_. ]?3[-_.: ]4b(?:[-_. ](?:instruct|thinking))?[-_. ]2507(?!\d)", re.IGNORECASE),
    _QWEN_36: re.compile(r"qwen[-_. ]?3\.6[-_.: ]27b(?![a-z0-9])", re.IGNORECASE),
}


def _llama_3(
    quantization: str, kld_mean: float, ppl_delta: float, same_top: float | None = None, *, imatrix: bool = False
) -> Published:
    return Published(
        model=_LLAMA_3, quantization=quantization, kld_mean=kld_mean, same_top=same_top, ppl_delta=ppl_delta,
        imatrix=imatrix, source=_PERPLEXITY,
    )  # fmt: skip


def _llama_2(quantization: str, kld_mean: float, ppl_delta: float, same_top: float) -> Published:
    return Published(
        model=_LLAMA_2, quantization=quantization, kld_mean=kld_mean, same_top=same_top, ppl_delta=ppl_delta,
        imatrix=False, source=_PERPLEXITY,
    )  # fmt: skip


def _qwen_3(quantization: str, kld_mean: float, kld_999: float) -> Published:
    return Published(model=_QWEN_3, quantization=quantization, kld_mean=kld_mean, kld_999=kld_999, source=_CARD)


PUBLISHED = (
    _llama_3("Q8_0", 0.001355, 0.002650, 97.674),
    _llama_3("Q6_K", 0.005452, 0.021748, 96.031),
    _llama_3("Q5_K_M", 0.010762, 0.056974),
    _llama_3("Q5_K_S", 0.016595, 0.104964),
    _llama_3("Q5_1", 0.018045, 0.106223),
    _llama_3("Q5_0", 0.022239, 0.131591),
    _llama_3("Q4_K_M", 0.031273, 0.175482, 91.901),
    _llama_3("Q4_K_M", 0.028152, 0.151303, imatrix=True),
    _llama_3("Q4_K_S", 0.043136, 0.268895),
    _llama_3("Q4_K_S", 0.031951, 0.178064, imatrix=True),
    _llama_3("IQ4_NL", 0.035742, 0.223959, imatrix=True),
    _llama_3("IQ4_XS", 0.036334, 0.228071, imatrix=True),
    _llama_3("Q4_1", 0.071683, 0.451103),
    _llama_3("Q4_0", 0.071940, 0.468514),
    _llama_3("Q3_K_L", 0.087176, 0.556242),
    _llama_3("Q3_K_L", 0.073077, 0.439590, imatrix=True),
    _llama_3("Q3_K_M", 0.101913, 0.656864),
    _llama_3("Q3_K_M", 0.084358, 0.502622, imatrix=True),
    _llama_3("Q3_K_S", 0.228217, 1.632152),
    _llama_3("Q3_K_S", 0.199821, 1.371244, imatrix=True),
    _llama_3("IQ3_M", 0.102534, 0.666694, imatrix=True),
    _llama_3("IQ3_S", 0.111278, 0.733867, imatrix=True),
    _llama_3("IQ3_XS", 0.138693, 0.931409, imatrix=True),
    _llama_3("IQ3_XXS", 0.183625, 1.226803, imatrix=True),
    _llama_3("Q2_K", 0.445132, 3.519934, 71.138),
    _llama_3("Q2_K", 0.332223, 2.416191, imatrix=True),
    _llama_3("Q2_K_S", 0.403360, 3.092145, imatrix=True),
    _llama_3("IQ2_M", 0.325989, 2.369166, imatrix=True),
    _llama_3("IQ2_S", 0.439197, 3.419148, imatrix=True),
    _llama_3("IQ2_XS", 0.546290, 4.529791, imatrix=True),
    _llama_3("IQ2_XXS", 0.812022, 7.860148, imatrix=True),
    _llama_3("IQ1_M", 1.393084, 19.262089, imatrix=True),
    _llama_3("IQ1_S", 2.254554, 54.462959, imatrix=True),
    _llama_2("Q8_0", 0.000369, 0.003990, 98.846),
    _llama_2("Q6_K", 0.002098, 0.013941, 97.520),
    _llama_2("Q4_K_M", 0.012686, 0.082526, 94.665),
    _llama_2("Q2_K", 0.108903, 0.625552, 85.584),
    _qwen_3("Q8_0", 0.0015, 0.042),
    _qwen_3("Q6_K", 0.0096, 0.297),
    _qwen_3("Q4_K_M", 0.0495, 1.017),
    Published(
        model=_QWEN_36, quantization="Q4_K_M", kld_mean=0.0247, kld_999=2.67, same_top=94.20, imatrix=True, source=_CARD
    ),
)


def published_for(name: str, quantization: str) -> list[Published]:
    """Return the published values of a quantization, those of the same family first, marked `same_family`.

    Args:
        name: of the model, its file or its repository; the quantization in it is ignored.
        quantization: `Q4_K_M`, in any case; `UD-` and `QAT-` formats are other ones, so none is published for them.
    """
    wanted = quantization.upper()
    if without_prefix(wanted) != wanted:
        return []
    family = next((model for model, matcher in _MATCHERS.items() if matcher.search(name)), "")
    found = [
        msgspec.structs.replace(row, same_family=row.model == family) for row in PUBLISHED if row.quantization == wanted
    ]
    return sorted(found, key=lambda row: not row.same_family)
