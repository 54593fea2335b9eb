"""Types that values are decoded into, safe in threads."""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar, overload

import msgspec

T = TypeVar("T")

_prepared: Final[set[Any]] = set()
_preparing: Final = threading.Lock()


@overload
def prepared(kind: type[T]) -> type[T]: ...
@overload
def prepared(kind: Any) -> Any: ...  # a union
def prepared(kind: Any) -> Any:
    """Return `kind` once msgspec knows its fields. Every type for `convert` and the decoders comes from here.

    msgspec (0.22, `StructInfo_Convert` of `_core.c`) publishes what it knows of a struct before the fields are filled
    in, and runs Python meanwhile: a thread that decodes the same struct then reads a null pointer, and the process ends
    with SIGSEGV."""
    if kind not in _prepared:
        with _preparing:
            msgspec.json.Decoder(kind)
            _prepared.add(kind)
    return kind
