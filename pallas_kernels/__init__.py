"""Array operations that XLA alone does not do well: products with weights, attention over pages, writing
into pages.

Each operation is a folder: `api` (the only entrance, says shapes), `reference` (readable oracle), the fast implementations,
`arg_specs` (one list of shapes for tests and benches), tests and a bench. `dispatch` picks an implementation by what the
machine can do. Knows nothing of models, requests or schedulers, and imports nothing of jaxserve.
"""

from pallas_kernels.grouped_linear.api import grouped_linear
from pallas_kernels.linear.api import linear
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.write_kv.api import write_kv

__all__ = ["grouped_linear", "linear", "paged_attention", "write_kv"]
