"""llama.cpp: bindings, models, contexts, sequences, threads and tokenizers."""
