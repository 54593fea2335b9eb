"""Grammars that constrain an answer: GBNF, llama.cpp's notation, checked and made from JSON schemas."""
