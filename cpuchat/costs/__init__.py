"""How long a pass takes: bytes, multiply-adds and fixed costs, of a model on a machine. Pure arithmetic."""

import os

# numpy multiplies no large matrices here: more threads of its own would only spin beside the engine's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
