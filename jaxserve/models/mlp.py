"""The gated MLP: `down(act(gate(x)) * up(x))`, gate and up as one multiplication."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.models.linear import linear

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nnx.silu,
    "gelu": lambda x: nnx.gelu(x, approximate=False),
    "gelu_tanh": lambda x: nnx.gelu(x, approximate=True),
}


class GatedMLP(nnx.Module):
    """Weights `gate_up` [2, F, D] (0 gate, 1 up) and `down` [D, F]; biases [2, F] and [D] where the model has them."""

    def __init__(
        self,
        activation: str,
        gate_up: Float[Array, "2 F D"],
        down: Float[Array, "D F"],
        gate_up_bias: Float[Array, "2 F"] | None = None,
        down_bias: Float[Array, "D"] | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        self.activation, self.backend = activation, backend
        self.gate_up, self.down = nnx.Param(gate_up), nnx.Param(down)
        self.gate_up_bias, self.down_bias = nnx.Param(gate_up_bias), nnx.Param(down_bias)

    def __call__(self, x: Float[Array, "T D"]) -> jax.Array:
        """Returns `[T, D]` in the dtype of `x`."""
        gate_up = linear(x, self.gate_up[...], self.gate_up_bias.get_value(), backend=self.backend)
        # In float32, or each operation inside the activation rounds to bfloat16.
        activated = ACTIVATIONS[self.activation](gate_up[:, 0].astype(jnp.float32)).astype(x.dtype)
        hidden = activated * gate_up[:, 1]
        return linear(hidden, self.down[...], self.down_bias.get_value(), backend=self.backend)
