"""Loads a converted checkpoint's logical tensors into a Decoder, fusing and casting layer by layer.

At any time the host holds one layer's tensors beside what is already on the device. Also the two helpers that carry a model
over the jit border. Where the tensors come from is the caller's `read`; the modules are in `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.errors import CheckpointError
from jaxserve.models.attention import Attention
from jaxserve.models.decoder import Decoder, DecoderLayer
from jaxserve.models.host_memory import HostMemory
from jaxserve.models.mlp import GatedMLP
from jaxserve.models.norm import RMSNorm
from jaxserve.models.registry import family_of
from jaxserve.models.spec import ModelSpec, TensorSpec

Read = Callable[[str], np.ndarray]


def load_model(spec: ModelSpec, read: Read, dtype: DTypeLike, *, device: jax.Device | None = None, attention: str | None = None) -> Decoder:
    """Builds the model on one device.

    Args:
        spec: What the model is.
        read: Gives a logical tensor by name, of any float dtype; raises KeyError for one that is not there.
        dtype: Of the activations, and of the weights except where `storage_dtype` says otherwise.
        device: Where the weights go; None is JAX's default device.
        attention: Implementation of attention and of the products with weights, a name of `pallas_kernels.dispatch`; None is
            the best available.

    Raises:
        CheckpointError: A tensor is missing or has another shape than the config says.
    """
    loader = _Loader(spec, read, storage_dtype(dtype, (device or jax.devices()[0]).platform), device)
    head = None if spec.is_tied else loader.optional("lm_head.weight")
    spec = replace(spec, is_tied=head is None)
    return Decoder(
        spec,
        dtype,
        embed=loader.tensor("embed_tokens.weight"),
        layers=[_load_layer(loader, spec, i, attention) for i in range(spec.num_layers)],
        norm=RMSNorm(loader.tensor("norm.weight"), spec.norm_eps),
        head=head,
        backend=attention,
    )


def storage_dtype(dtype: DTypeLike, platform: str) -> np.dtype[Any]:
    """The dtype that weights are held in: `dtype`, but float32 for float16 on CPU.

    XLA:CPU has no float16 matmul: it would widen every weight to float32 again in every step.
    """
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if platform == "cpu" and dtype == jnp.float16 else dtype


class ModelDef(NamedTuple):
    """Everything of a model but its arrays; hashable, so a static argument of jit."""

    graphdef: Any
    treedef: Any


def split_model(model: Decoder) -> tuple[ModelDef, tuple[jax.Array, ...]]:
    """The model's structure, and its weights as the flat tuple that crosses the jit border. Done once, after loading."""
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return ModelDef(graphdef, treedef), tuple(leaves)


def merge_model(model_def: ModelDef, leaves: Sequence[jax.Array]) -> Decoder:
    """The model again, from `split_model`'s parts. Done once inside a trace."""
    return nnx.merge(model_def.graphdef, jax.tree.unflatten(model_def.treedef, leaves))


class _Loader:
    """Reads logical tensors, checks their shapes, casts them and puts them on the device."""

    def __init__(self, spec: ModelSpec, read: Read, dtype: np.dtype[Any], device: jax.Device | None) -> None:
        self._specs: dict[str, TensorSpec] = {tensor.name: tensor for tensor in family_of(spec).tensors(spec)}
        self._read, self._dtype, self._device = read, dtype, device
        # On CPU the device's arrays are these very ones.
        is_cpu = (device or jax.devices()[0]).platform == "cpu"
        self._empty = HostMemory().empty if is_cpu else np.empty

    def tensor(self, name: str) -> jax.Array:
        """One tensor as it is."""
        return self.fused(self._specs[name].shape, {name: ()})

    def optional(self, name: str) -> jax.Array | None:
        """One tensor, or None where the checkpoint lacks it."""
        try:
            return self.tensor(name)
        except KeyError:
            return None

    def fused(self, shape: tuple[int, ...], parts: dict[str, tuple[int | slice, ...]]) -> jax.Array:
        """Several tensors in one array of `shape`, each at its place."""
        fused = self._empty(shape, self._dtype)
        for name, place in parts.items():
            view = fused[place]
            view[...] = self._checked(name).reshape(view.shape)
        return jax.device_put(fused, self._device)

    def _checked(self, name: str) -> np.ndarray:
        tensor = self._specs[name]
        try:
            array = self._read(name)
        except KeyError:
            if tensor.is_optional:
                raise
            raise CheckpointError(f"The checkpoint has no tensor {name}; convert it again.") from None
        if array.shape != tensor.shape:
            raise CheckpointError(f"Tensor {name} has shape {array.shape}; the config says {tensor.shape}.")
        return array


def _load_layer(loader: _Loader, spec: ModelSpec, layer: int, attention: str | None) -> DecoderLayer:
    k, g, h, d, f = spec.num_kv_heads, spec.num_query_groups, spec.head_dim, spec.hidden_size, spec.mlp_size
    group, _ = spec.kv_places[layer]

    def qkv(kind: str, *tail: int) -> jax.Array:
        every = slice(None)
        places: dict[str, tuple[int | slice, ...]] = {"q": (every, slice(g)), "k": (every, g), "v": (every, g + 1)}
        return loader.fused((k, g + 2, h, *tail), {f"layers.{layer}.self_attn.{n}_proj.{kind}": place for n, place in places.items()})

    def gate_up(kind: str, *tail: int) -> jax.Array:
        return loader.fused((2, f, *tail), {f"layers.{layer}.mlp.{n}_proj.{kind}": (i,) for i, n in enumerate(("gate", "up"))})

    return DecoderLayer(
        attention_norm=RMSNorm(loader.tensor(f"layers.{layer}.input_layernorm.weight"), spec.norm_eps),
        attention=Attention(
            spec,
            qkv=qkv("weight", d),
            out=loader.tensor(f"layers.{layer}.self_attn.o_proj.weight"),
            qkv_bias=qkv("bias") if spec.biases.qkv else None,
            out_bias=loader.tensor(f"layers.{layer}.self_attn.o_proj.bias") if spec.biases.attention_out else None,
            window=spec.kv_groups[group].window,
            backend=attention,
        ),
        mlp_norm=RMSNorm(loader.tensor(f"layers.{layer}.post_attention_layernorm.weight"), spec.norm_eps),
        mlp=GatedMLP(
            spec.activation,
            gate_up=gate_up("weight", d),
            down=loader.tensor(f"layers.{layer}.mlp.down_proj.weight"),
            gate_up_bias=gate_up("bias") if spec.biases.mlp else None,
            down_bias=loader.tensor(f"layers.{layer}.mlp.down_proj.bias") if spec.biases.mlp else None,
            backend=attention,
        ),
    )
