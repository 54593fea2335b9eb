"""Plans models on machines that need not be here: fit, speed, users."""
