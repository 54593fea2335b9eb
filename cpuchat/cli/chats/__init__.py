"""`cpuchat chats`: list, search, show, export, import and delete chats."""
