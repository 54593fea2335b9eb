"""Chats as files: export and import without loss, and imports from other programs."""
