"""Chats on disk: store, search."""
