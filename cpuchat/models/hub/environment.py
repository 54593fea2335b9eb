"""The environment variables of huggingface_hub: where the hub is, and whether it may be contacted.

They are read at each use; huggingface_hub reads them once, at import.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

DEFAULT_ENDPOINT = "https://huggingface.co"
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})  # constants.ENV_VARS_TRUE_VALUES of huggingface_hub


def endpoint() -> str:
    """Return `HF_ENDPOINT`, else the public hub, without a trailing slash."""
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or DEFAULT_ENDPOINT


def host() -> str:
    """Return the endpoint's host and port for messages, without a password that the address may hold."""
    try:
        return urlsplit(endpoint()).netloc.rpartition("@")[2] or "HF_ENDPOINT"
    except ValueError:  # brackets that are no IPv6 address
        return "HF_ENDPOINT"


def is_offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`) forbids all requests."""
    return is_set("HF_HUB_OFFLINE") if os.environ.get("HF_HUB_OFFLINE") else is_set("TRANSFORMERS_OFFLINE")


def is_set(variable: str) -> bool:
    """Return whether this environment variable is true, as huggingface_hub understands it."""
    return os.environ.get(variable, "").upper() in _TRUE
