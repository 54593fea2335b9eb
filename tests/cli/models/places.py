"""Where tests of `cpuchat models` keep models."""

from __future__ import annotations

import json
import os
from pathlib import Path


def folder_setting(folder: Path) -> None:
    """Add `folder` to config.toml."""
    file = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(f"[model]\nfolders = [{json.dumps(str(folder))}]\n")
