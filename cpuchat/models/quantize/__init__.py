"""Quantizes models: `types` to choose from, a `forecast` of each, a `place` for the file, `make` writes it.

llama.cpp does the work in its own `process` (`engine.quantize`).
"""
