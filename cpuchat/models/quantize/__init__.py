"""Makes a smaller file of a model: `types` to choose from, a `forecast` of each, a `place` for it, `make` does it.

The work is done by llama.cpp in a `process` of its own (`engine.quantize`), which is only spoken to from here.
"""
