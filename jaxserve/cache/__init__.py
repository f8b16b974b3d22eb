"""KV pages as host bookkeeping: who owns which page, and which pages hold a known prefix. Plain Python, no JAX.

Read `page_pool`, then `prefix_cache`. Which sequence gets which page is decided in `jaxserve.scheduler`.
"""
