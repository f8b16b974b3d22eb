"""Multi-head latent attention over pages of latent vectors, in the absorbed form: heads attend to the vectors themselves.

A query is carried into the space of the latent vectors by its head's key matrix, and what attention gives is carried out of it by the
head's value matrix, so that keys and values of the heads never exist (DeepSeek-V2, arXiv 2405.04434, section 2.1.2; transformers'
DeepseekV2Attention and DeepseekV3Attention expand them instead, with the same result).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.arrays import PageArray
from jaxserve.models.attention import LayerInputs
from jaxserve.models.kv_cache import write_and_attend
from jaxserve.models.linear import headwise, linear
from jaxserve.models.norm import Norm
from jaxserve.models.rope import rotate
from jaxserve.models.spec import LatentAttentionSpec


class LatentAttention(nnx.Module):
    """One layer. Letters: R `kv_rank`, Q `query_rank`.

    Weights: `query` [N, nope + rope, D or Q]; `query_down` [Q, D] with `query_norm` where queries are low-rank; `kv_down` [R + rope, D]
    with `kv_norm`; `key_up` [N, R, nope] and `value_up` [N, value, R], the two halves of the source's kv_b_proj; `out` [D, N * value].
    """

    def __init__(
        self,
        spec: LatentAttentionSpec,
        *,
        query: Float[Array, "N nope+rope in"],
        kv_down: Float[Array, "R+rope D"],
        kv_norm: Norm,
        key_up: Float[Array, "N R nope"],
        value_up: Float[Array, "N value R"],
        out: Float[Array, "D N*value"],
        query_down: Float[Array, "Q D"] | None = None,
        query_norm: Norm | None = None,
        biases: dict[str, jax.Array] | None = None,
        backend: str | None,
    ) -> None:
        self.spec, self.backend = spec, backend
        self.query, self.query_down, self.query_norm = nnx.Param(query), nnx.Param(query_down), nnx.data(query_norm)
        self.kv_down, self.kv_norm = nnx.Param(kv_down), kv_norm
        self.key_up, self.value_up, self.out = nnx.Param(key_up), nnx.Param(value_up), nnx.Param(out)
        self.biases = nnx.Dict({name: nnx.Param(bias) for name, bias in (biases or {}).items()})

    def __call__(self, x: Float[Array, "T D"], inputs: LayerInputs, pages: PageArray, *, is_decode: bool) -> tuple[jax.Array, PageArray]:
        """Returns the output `[T, D]` in the dtype of `x`, and the pages with the step's latent vectors."""
        spec = self.spec
        assert inputs.cos is not None and inputs.sin is not None
        down = self._linear("kv_down", x, self.kv_down[...])
        shared_key = rotate(down[:, None, spec.kv_rank :], inputs.cos, inputs.sin)
        latent = jnp.concatenate([self.kv_norm(down[:, : spec.kv_rank])[:, None], shared_key], axis=-1)  # [T, 1, R + rope]
        query = self._queries(x)
        rotated = rotate(query[:, :, spec.nope_dim :], inputs.cos, inputs.sin)
        absorbed = headwise(query[:, :, : spec.nope_dim], self.key_up[...])
        queries = jnp.concatenate([absorbed, rotated], axis=-1)
        attended, pages = write_and_attend(
            queries, latent, None, inputs, pages, backend=self.backend, is_decode=is_decode, scale=spec.scale
        )
        values = headwise(attended[:, :, : spec.kv_rank], self.value_up[...])
        return self._linear("out", values.reshape(x.shape[0], -1), self.out[...]), pages

    def _queries(self, x: Float[Array, "T D"]) -> Float[Array, "T N nope+rope"]:
        down = self.query_down.get_value()
        if down is not None:
            assert self.query_norm is not None
            x = self.query_norm(self._linear("query_down", x, down))
        return linear(x, self.query[...], backend=self.backend)

    def _linear(self, name: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        bias = self.biases[name][...] if name in self.biases else None
        return linear(x, weight, bias, backend=self.backend)
