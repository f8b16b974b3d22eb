"""Text on both sides of the engine: tokens, templates, incremental decoding, stop strings. Imports no JAX.

The only importer of `tokenizers` and `jinja2`. Inward: `chat_template` then `tokenizer`. Outward, in this order: `pieces` (bytes
of a token), `detokenizer` (bytes to text), `stop` (where text ends), `sequence_text` (all of it, for one sequence).
"""
