"""GGUF files: reading headers, finding, fitting in memory, writing synthetic ones."""
