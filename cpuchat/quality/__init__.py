"""Quality loss: two models compared over the same tokens."""

import os

# Rows are compared by threads of our own: more of numpy's would only spin beside them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
