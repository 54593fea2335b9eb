"""The inference process: `python -m cpuchat.worker`."""
