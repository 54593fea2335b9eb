"""Widgets: each knows how to show one thing and what the user did to it; screens decide what follows."""
