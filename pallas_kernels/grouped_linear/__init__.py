"""Rows that are dealt out to blocks times the matrices of the blocks' experts. The entrance is `api`."""
