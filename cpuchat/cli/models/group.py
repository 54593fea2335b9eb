"""The `cpuchat models` command group."""

from __future__ import annotations

import click

from cpuchat.cli.lazy import LazyGroup

_COMMANDS = {
    "list": ("cpuchat.cli.models.list", "list_models", "List the models on this machine."),
    "delete": ("cpuchat.cli.models.delete", "delete_model", "Delete a model and free its disk space."),
    "verify": ("cpuchat.cli.models.verify", "verify", "Compare files with their published checksums."),
    "search": ("cpuchat.cli.models.search", "search", "Search Hugging Face for GGUF repositories."),
    "files": ("cpuchat.cli.models.files", "files", "List the models of a repository, with fit and speed here."),
    "download": ("cpuchat.cli.models.download", "download", "Download a model from Hugging Face and verify it."),
    "show": ("cpuchat.cli.models.show", "show", "Show the header of a model."),
    "catalog": ("cpuchat.cli.models.catalog", "catalog", "List recommended models, with fit and speed here."),
    "pair": ("cpuchat.cli.models.pair", "pair", "Check which draft models fit a target."),
    "quantize": ("cpuchat.cli.models.quantize", "quantize", "Quantize a model."),
    "synthetic": (
        "cpuchat.cli.models.synthetic",
        "synthetic",
        "Write a random-weight model in the shape of a real one.",
    ),
}


@click.group(cls=LazyGroup, commands_by_name=_COMMANDS)
def models() -> None:
    """Find, download, inspect, quantize and delete models."""
