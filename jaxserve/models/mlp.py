"""The MLP: `down(act(gate(x)) * up(x))` with gate and up as one multiplication, or `down(act(up(x)))` without a gate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.models.linear import linear

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nnx.silu,
    "gelu": lambda x: nnx.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nnx.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * nnx.sigmoid(1.702 * x),
    "relu": nnx.relu,
    "relu2": lambda x: jnp.square(nnx.relu(x)),
}
"""Formulas by the names that `config_values.activation` gives."""


class MLP(nnx.Module):
    """Weights `inner` [2, F, D] (0 gate, 1 up) or [1, F, D] (up alone), and `down` [D, F]; biases likewise where the model has them."""

    def __init__(
        self,
        activation: str,
        inner: Float[Array, "parts F D"],
        down: Float[Array, "D F"],
        inner_bias: Float[Array, "parts F"] | None = None,
        down_bias: Float[Array, "D"] | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        self.activation, self.backend = activation, backend
        self.inner, self.down = nnx.Param(inner), nnx.Param(down)
        self.inner_bias, self.down_bias = nnx.Param(inner_bias), nnx.Param(down_bias)

    def __call__(self, x: Float[Array, "T D"], num_tokens: Int32[Array, ""]) -> jax.Array:
        """Returns `[T, D]` in the dtype of `x`. `num_tokens` is for mixtures of experts, which leave padding out."""
        inner = linear(x, self.inner[...], self.inner_bias.get_value(), backend=self.backend)
        # In float32, or each operation inside the activation rounds to bfloat16.
        hidden = ACTIVATIONS[self.activation](inner[:, 0].astype(jnp.float32)).astype(x.dtype)
        if inner.shape[1] == 2:
            hidden = hidden * inner[:, 1]
        return linear(hidden, self.down[...], self.down_bias.get_value(), backend=self.backend)
