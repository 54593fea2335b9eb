"""From tokens to the text that the user sees."""
