"""Chats on disk: store, search, export."""
