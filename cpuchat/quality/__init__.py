"""Quality loss: two models compared over the same tokens, and over the same questions."""
