"""How the models of this machine are called on the command line."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuchat.models.library import LocalModel


def specs_of(found: list[LocalModel]) -> list[str]:
    """The shortest text by which `Library.resolve` finds each model."""
    from cpuchat.models.library import DEMO_FILES

    demo = {file: name for name, file in DEMO_FILES.items()}
    per_repo = Counter((model.repo, model.quantization) for model in found)
    specs: list[str] = []
    for model in found:
        if model.source == "demo":
            specs.append(demo[model.path.name])
        elif model.repo and model.quantization and per_repo[model.repo, model.quantization] == 1:
            specs.append(f"{model.repo}:{model.quantization}")
        else:
            specs.append(str(model.path))
    return specs
