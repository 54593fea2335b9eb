"""Training of the small demo models; nothing here is part of an installed cpuchat."""
