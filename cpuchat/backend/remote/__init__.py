"""OpenAI-compatible servers as engines: llama-server, vLLM, Ollama, LM Studio, and any other."""
