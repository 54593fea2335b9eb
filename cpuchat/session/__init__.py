"""The headless core of a chat: a conversation with a model, and the state machine that app and plain chat drive."""
