"""The draft model, what passes cost, and the speculator over all drafters."""
