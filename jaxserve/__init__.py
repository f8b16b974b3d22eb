"""jaxserve: an LLM inference engine compiled by JAX/XLA.

    from jaxserve import LLM, SamplingParams

The names load on first use, so that `import jaxserve` loads neither JAX nor transformers. To read the engine, begin with
`jaxserve.core`, then `jaxserve.engine.engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_llm import AsyncLLM
    from jaxserve.config import EngineConfig
    from jaxserve.core.pooling_params import PoolingParams
    from jaxserve.core.sampling_params import SamplingParams
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_MODULES = {
    "AsyncLLM": "jaxserve.async_llm",
    "CompletionOutput": "jaxserve.outputs",
    "EmbeddingOutput": "jaxserve.outputs",
    "EmbeddingRequestOutput": "jaxserve.outputs",
    "EngineConfig": "jaxserve.config",
    "LLM": "jaxserve.llm",
    "PoolingParams": "jaxserve.core.pooling_params",
    "RequestOutput": "jaxserve.outputs",
    "SamplingParams": "jaxserve.core.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
