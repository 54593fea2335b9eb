"""Screens, each with its style sheet beside it. Imported when first shown, but the chat."""
