"""Merges JSON schemas that all apply: `allOf`, and keywords beside `$ref` or `anyOf`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

Schema = dict[str, Any]

_LOWER = ("minLength", "minItems", "minimum", "exclusiveMinimum")
_UPPER = ("maxLength", "maxItems", "maximum", "exclusiveMaximum")


def merge(one: Schema, other: Schema) -> Schema:
    """Return a schema that allows what both allow.

    Raises:
        ValueError: they cannot be merged; the message says why.
    """
    closed = [s for s in (one, other) if s.get("additionalProperties") is False]
    properties = [set(s.get("properties", ())) for s in (one, other)]
    if closed and properties[0] != properties[1]:
        raise ValueError("additionalProperties: false cannot be combined with properties of another schema")
    merged = one | other
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        if a == b:
            continue
        if key == "properties":
            merged[key] = a | {name: {"allOf": [a[name], value]} if name in a else value for name, value in b.items()}
        elif key == "required":
            merged[key] = list(dict.fromkeys([*a, *b]))
        elif key == "enum":
            merged[key] = common(a, b)
        elif key == "type":
            merged[key] = _both_types(_listed(a), _listed(b))
        elif key in _LOWER:
            merged[key] = max(a, b)
        elif key in _UPPER:
            merged[key] = min(a, b)
        else:
            raise ValueError(f"schemas with a different {key} cannot be combined")
    return merged


def common(values: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return the JSON values that are among `others`: true is not 1, but 1 is 1.0."""
    kept = set(map(_key, others))
    return [value for value in values if _key(value) in kept]


def _key(value: Any) -> Hashable:
    """Return what is equal for equal JSON values."""
    if isinstance(value, dict):
        return frozenset((name, _key(one)) for name, one in value.items())
    return tuple(map(_key, value)) if isinstance(value, list) else (isinstance(value, bool), value)


def _listed(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]


def _both_types(one: list[Any], other: list[Any]) -> list[Any]:
    one, other = list(dict.fromkeys(one)), list(dict.fromkeys(other))
    both = [kind for kind in one if kind in other or (kind == "integer" and "number" in other)]
    both += [kind for kind in other if kind == "integer" and "number" in one and kind not in both]
    if not both:
        raise ValueError(f"no value has the types {', '.join(map(str, one))} and {', '.join(map(str, other))}"[:200])
    return both
