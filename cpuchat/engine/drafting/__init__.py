"""The draft model, the costs of passes, and the speculator over all drafters."""
