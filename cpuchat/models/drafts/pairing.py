"""Checks whether one model can draft for another, by the headers of their files, without loading them.

A draft model proposes token ids, so they must mean the same in both vocabularies. The rule is that of llama.cpp
(common_speculative_are_compatible in common/speculative.cpp of llama-cpp-python 0.3.36), what a header leaves out
is filled in as its tokenizer does (llama_vocab::impl::load in llama-vocab.cpp).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cpuchat.base.errors import ModelNotFound
from cpuchat.base.text import clean_line
from cpuchat.measure import store
from cpuchat.measure.subject import Subject
from cpuchat.models.engine_version import PINNED_VERSION, RECURRENT
from cpuchat.models.file_names import stat_fingerprint
from cpuchat.models.gguf.header import GGUFHeader, model_files, model_size, read_header, vocabulary
from cpuchat.models.heads import MAX_SIZE_DIFFERENCE, is_own

FIRST_CHECKED_TOKEN = 5
_SHOWN_TOKEN = 32
OTHER_DRAFTS = "`cpuchat models pair MODEL` lists the models that fit; suffix decoding needs none."


class Compatibility(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a draft model fits a target.

    `reason` is the first mismatch, as a clause ("its vocabulary has ..."), "" when `ok`. `note`: it works, but with a
    drawback."""

    ok: bool
    reason: str = ""
    note: str = ""


_KEPT = "why a draft model does not fit"


def _pair(target: Path, draft: Path) -> Subject:
    """Return two models as they are now, under the rule of this engine. Raises OSError when a file does not exist."""
    return Subject(build=PINNED_VERSION, model=tuple(stat_fingerprint(model_files(path)) for path in (target, draft)))


def check_pair(target: GGUFHeader, draft: GGUFHeader) -> Compatibility:
    """Check a pair by headers that are read already. Under 0.2 s for 150k tokens."""
    if is_own(target.path, draft.path):
        return _ITSELF
    return _verdict(_difference(target, draft), target.file_size, draft.file_size)


_ITSELF = Compatibility(ok=False, reason="it is the target itself")


def _verdict(reason: str, target_size: int, draft_size: int) -> Compatibility:
    """Build the verdict. `*_size`: bytes of the files."""
    note = ""
    if not reason and draft_size >= target_size:
        note = "The draft model is not smaller than the target, so it cannot speed up decoding."
    return Compatibility(ok=not reason, reason=reason, note=note)


def _difference(target: GGUFHeader, draft: GGUFHeader) -> str:
    """Return the first mismatch; "" when there is none."""
    if draft.other:
        return f"it is {draft.other}"
    if draft.architecture in RECURRENT:
        return f"it is a recurrent model ({_shown(draft.architecture)}), which cpuchat does not use as a draft"
    ours, theirs = vocabulary(target), vocabulary(draft)
    if ours.kind != theirs.kind:
        return f"its tokenizer is {_shown(theirs.model)}, the target's is {_shown(ours.model)}"
    for what, name, adds, ids in (
        ("starts", "bos", (ours.add_bos, theirs.add_bos), (ours.bos, theirs.bos)),
        ("ends", "eos", (ours.add_eos, theirs.add_eos), (ours.eos, theirs.eos)),
    ):
        if adds[0] != adds[1]:
            those = ("the target", "the draft") if adds[0] else ("the draft", "the target")
            return f"{those[0]} {what} every text with its {name} token, and {those[1]} does not"
        if adds[0] and ids[0] != ids[1]:
            return f"the {name} token is {_id(ids[0])} in the target and {_id(ids[1])} in the draft"
    if abs(ours.n_tokens - theirs.n_tokens) > MAX_SIZE_DIFFERENCE:
        return (
            f"its vocabulary has {theirs.n_tokens:,} tokens against {ours.n_tokens:,} of the target "
            f"(at most {MAX_SIZE_DIFFERENCE} may differ)"
        )
    if ours.tokens is None and theirs.tokens is None:
        return ""  # synthetic models: ids without texts
    if ours.tokens is None or theirs.tokens is None:
        return f"the {'target' if ours.tokens is None else 'draft'} has no token texts"
    if ours.tokens.shares_strings(theirs.tokens, FIRST_CHECKED_TOKEN):
        return ""
    first, second = ours.tokens[:], theirs.tokens[:]
    end = min(len(first), len(second))
    if first[FIRST_CHECKED_TOKEN:end] == second[FIRST_CHECKED_TOKEN:end]:
        return ""
    at = next(i for i in range(FIRST_CHECKED_TOKEN, end) if first[i] != second[i])
    return f"token {at} is {_shown(first[at])} in the target and {_shown(second[at])} in the draft"


def _id(token: int) -> str:
    return "none" if token < 0 else str(token)


def _shown(text: object) -> str:
    """Return a text of the file, shortened, safe for a terminal."""
    plain = clean_line(str(text))
    return f"'{plain if len(plain) <= _SHOWN_TOKEN else plain[: _SHOWN_TOKEN - 1] + '…'}'"


def check_files(target: Path, draft: Path) -> Compatibility:
    """Check two files; cached results are not computed again. Raises ModelNotFound, ModelDamaged: a file cannot be
    read."""
    first, second = model_files(target)[0], model_files(draft)[0]
    if is_own(first, second):
        return _ITSELF
    try:
        pair, sizes = _pair(first, second), (model_size(first), model_size(second))
    except OSError as error:
        raise ModelNotFound(f"Cannot open {error.filename}: {error.strerror}.", "Check the path.") from None
    if (known := store.find(pair, _KEPT, str)) is not None:
        return _verdict(known.value, *sizes)
    reason = _difference(read_header(first), read_header(second))
    store.keep(pair, _KEPT, reason)
    return _verdict(reason, *sizes)


def is_known_pair(target: Path, draft: Path) -> bool:
    """Return whether both, as they are now, were found to fit before; reads no header."""
    try:
        known = store.find(_pair(target, draft), _KEPT, str)
    except OSError:
        return False
    return known is not None and not known.value
