"""Grammars that constrain an answer: GBNF, llama.cpp's notation, checked (`gbnf`) and made from JSON schemas (`schema`,
with the rules of `rules`).

llama-cpp-python has a converter of its own (`llama_cpp.llama_grammar.json_schema_to_gbnf`, tried in 0.3.36). It is not
used, because its grammars allow what the schema forbids: it ignores `minimum`, `maximum`, their exclusive forms,
`multipleOf`, `uniqueItems` and `not`, keywords beside a `$ref`, and `allOf` of anything but objects. It fails on
recursive `$ref`s, on `#`, on escaped pointers and on patterns without anchors, writes `\\d` as two characters, and an
enum as a flat list, of which llama.cpp follows every value at once. Processes that draw the app could not import it
either: it loads llama.cpp.
"""
