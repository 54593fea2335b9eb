"""cpuchat: a terminal chat for local language models on CPUs."""

import sys

__version__ = "0.1.0"

# httpx imports its own command line where click and rich are installed, which takes longer than httpx itself. Without
# it, httpx goes on as where they are not.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
