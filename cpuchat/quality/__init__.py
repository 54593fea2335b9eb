"""Quality loss: two models compared over the same tokens."""
