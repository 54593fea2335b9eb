"""cpuchat: a terminal chat for local language models on CPUs."""

__version__ = "0.1.0"
