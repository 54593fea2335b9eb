"""The command line: one module per command; `main` finds and starts them, and turns every failure into a message."""
