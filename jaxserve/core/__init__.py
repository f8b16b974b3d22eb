"""The vocabulary of the engine: plain Python types that every layer above shares. Imports no JAX and no NumPy on device.

Read in this order: `sampling_params`, `pooling_params`, `request`, `sequence`, `plan`, `events`, `buckets`, `page_counts`.
"""
