"""How long a pass takes: bytes, multiply-adds and fixed costs, of a model on a machine. Pure arithmetic."""

import os

# The matrices of a fit are small: more threads of numpy would only spin beside the engine's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
