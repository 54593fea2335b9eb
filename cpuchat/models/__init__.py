"""Models: GGUF headers, the local library, the hub, downloads, memory fit, predictions, draft models, quantizing."""
