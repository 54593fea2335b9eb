"""Quantizes models: `types` to choose from, with a forecast of each; `make` has llama.cpp write the file."""
