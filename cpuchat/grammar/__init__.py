"""Grammars that constrain an answer, for llguidance: from GBNF (`gbnf`) and from JSON schemas (`schema`)."""
