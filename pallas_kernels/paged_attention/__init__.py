"""Attention of a step's ragged tokens over KV pages. Start at `api`."""
