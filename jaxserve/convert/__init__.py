"""From a Hugging Face directory, a GGUF file or a hub id to a converted checkpoint.

The way: `hub.py` (download) -> `read_safetensors.py` or `read_gguf.py` (what is there, checked) -> `match.py` (which tensor is
which) -> `write_orbax.py` (piece by piece) -> the manifest of `jaxserve.checkpoint`; `pipeline.py` is the order of these.
`resolve.py` converts once into a cache for `serve`, `generate` and `LLM`. `python -m jaxserve.convert` is `__main__.py`.
"""

from jaxserve.convert.pipeline import convert

__all__ = ["convert"]
