"""On CPU, blocks of rows times their experts' matrices go through XLA: its own loop, each product by XLA's library."""

from pallas_kernels.grouped_linear.xla import grouped_linear

__all__ = ["grouped_linear"]
