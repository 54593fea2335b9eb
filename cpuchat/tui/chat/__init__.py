"""The chat screen: transcript, prompt, list of chats, live figures."""
