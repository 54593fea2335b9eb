"""Where answers come from: a local worker process."""

from cpuchat.backend.base import Backend, GenerateRequest

__all__ = ["Backend", "GenerateRequest"]
