"""Diagnostics: what limits inference on this machine, with evidence and what to do."""
