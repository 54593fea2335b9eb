"""Figures and machines as words and rows, for the app and the command line alike."""
