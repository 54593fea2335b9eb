"""Tests of cpuchat; the folders are those of the package."""

import os

# Before numpy is imported: its threads would spin, one per core, in every process that runs tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
