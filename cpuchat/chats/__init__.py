"""Chats on disk: the store and its search."""
