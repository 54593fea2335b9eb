"""How long a pass takes: bytes, multiply-adds and fixed costs, of a model on a machine."""
