"""The tour of `cpuchat demo --tour`: the app shows itself to an audience."""
