"""Downloads of models: checked before, during and after, resumable at any byte, each in its own process."""
