"""Widgets and dialogs that two features use."""
