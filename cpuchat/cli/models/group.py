"""The `cpuchat models` command group."""

from __future__ import annotations

import click

from cpuchat.cli.lazy import LazyGroup

_COMMANDS = {
    "list": ("cpuchat.cli.models.library", "list_models", "List the models on this machine."),
    "catalog": ("cpuchat.cli.models.download", "catalog", "List recommended models, with fit and speed here."),
    "search": ("cpuchat.cli.models.download", "search", "Search Hugging Face for GGUF repositories."),
    "download": ("cpuchat.cli.models.download", "download", "Download a model from Hugging Face and verify it."),
    "show": ("cpuchat.cli.models.library", "show", "Show the header of a model."),
    "pair": ("cpuchat.cli.models.quantize", "pair", "Check which draft models fit a target."),
    "quantize": ("cpuchat.cli.models.quantize", "quantize", "Quantize a model."),
    "verify": ("cpuchat.cli.models.library", "verify", "Compare files with their published checksums."),
    "delete": ("cpuchat.cli.models.library", "delete_model", "Delete a model and free its disk space."),
}


@click.group(cls=LazyGroup, commands_by_name=_COMMANDS)
def models() -> None:
    """Find, download, show, quantize and delete models."""
