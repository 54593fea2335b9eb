"""Downloads of models: checked before, while and after, resumable at any byte, each in a process of its own."""
