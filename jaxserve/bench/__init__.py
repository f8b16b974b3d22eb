"""Benchmarks: each prints a card for people and, as its last line, one JSON document. Run as `jaxserve bench NAME`."""
