"""Which settings of a loaded model work, and what each is worth."""
