"""What a model would do on a machine that need not be here: speed, users, cost."""
