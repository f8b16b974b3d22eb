"""Builds a Decoder from a converted checkpoint's logical tensors, layer by layer: which tensors a weight is fused of, and in what order.

On one device, in shards on a mesh, or with shapes in place of arrays: `loader.py` has the three ways. Also the two helpers that carry a
model over the jit border. The modules are in `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models.attention import Attention
from jaxserve.models.decoder import Decoder, DecoderLayer
from jaxserve.models.loader import AbstractLoader, Loader, MeshLoader, Read, TensorSource
from jaxserve.models.mla import LatentAttention
from jaxserve.models.mlp import MLP
from jaxserve.models.moe import MoE
from jaxserve.models.norm import Norm
from jaxserve.models.recurrent import GatedDeltaNet
from jaxserve.models.shards import AXIS, UNCUT, Shards
from jaxserve.models.spec import (
    AttentionSpec,
    LatentAttentionSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RecurrentSpec,
    RopeSpec,
)
from jaxserve.models.tensors import norm_names


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
    loader = Loader(spec, read, storage_dtype(dtype, (device or jax.devices()[0]).platform), device)
    return _build(loader, dtype, attention)


def load_model_on_mesh(
    spec: ModelSpec, source: TensorSource, dtype: DTypeLike, *, mesh: Mesh, has_expert_parallel: bool = False, attention: str | None = None
) -> Decoder:
    """Builds the model in equal shards on the devices of a mesh with the one axis `shards.AXIS`.

    Its spec is that of one shard, and its modules compute inside `shard_map` with every weight cut along the first axis. The rest is as for
    `load_model`.

    Raises:
        ConfigError: The model cannot be cut into so many shards.
        CheckpointError: A tensor is missing or has another shape than the config says.
    """
    dtype_held = storage_dtype(dtype, mesh.devices.flat[0].platform)
    return _build(MeshLoader(spec, source, dtype_held, mesh, Shards(mesh.size, has_expert_parallel)), dtype, attention)


def abstract_model(
    spec: ModelSpec, dtype: DTypeLike, *, platform: str = "gpu", shards: Shards = UNCUT, attention: str | None = None
) -> Decoder:
    """The model with a `jax.ShapeDtypeStruct` in place of each array: touches no device and reads nothing."""
    return _build(AbstractLoader(spec, storage_dtype(dtype, platform), shards), dtype, attention)


def _build(loader: Loader, dtype: DTypeLike, attention: str | None) -> Decoder:
    spec = loader.spec
    head = None if spec.head.is_tied else loader.optional("lm_head.weight")
    spec = replace(spec, head=replace(spec.head, is_tied=head is None))
    return Decoder(
        spec,
        dtype,
        embed=loader.tensor("embed_tokens.weight"),
        layers=[_Layer(loader, spec, i, dtype, attention).load() for i in range(spec.num_layers)],
        norm=loader.norm("norm", spec.norm),
        head=head,
        positions=loader.tensor("embed_positions.weight") if spec.embedding.num_positions is not None else None,
        head_bias=loader.tensor("lm_head.bias") if spec.head.has_bias else None,
        backend=attention,
        shards=loader.shards,
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


class _Layer:
    """Loads the parts of one layer."""

    def __init__(self, loader: Loader, spec: ModelSpec, index: int, dtype: DTypeLike, backend: str | None) -> None:
        self._loader, self._model, self._spec, self._backend = loader, spec, spec.layers[index], backend
        self._prefix, self._dtype = f"layers.{index}.", dtype

    def load(self) -> DecoderLayer:
        names = norm_names(self._model)
        norms = {name: self._loader.norm(self._prefix + name, self._model.norm) for name in names}
        return DecoderLayer(self._model.block, self._mixer(), self._mlp(), norms, self._dtype, shards=self._loader.shards)

    def _mixer(self) -> Attention | LatentAttention | GatedDeltaNet:
        match self._spec.attention:
            case RecurrentSpec() as spec:
                return self._recurrent(spec, self._prefix + "linear_attn.")
            case LatentAttentionSpec() as spec:
                return self._latent(spec, self._prefix + "self_attn.")
            case AttentionSpec() as spec:
                return self._attention(spec, self._prefix + "self_attn.")

    def _recurrent(self, spec: RecurrentSpec, prefix: str) -> GatedDeltaNet:
        loader, groups = self._loader, spec.num_value_groups
        sizes = {"q": spec.key_dim, "k": spec.key_dim, "v": spec.values_dim, "gate": spec.values_dim, "rate": groups, "decay": groups}

        def by_key_head(kind: str, names: tuple[str, ...], tail: int) -> jax.Array:
            parts: dict[str, tuple[int | slice, ...]] = {}
            stop = 0
            for name in names:
                start, stop = stop, stop + sizes[name]
                parts[f"{prefix}{name}_{kind}.weight"] = (slice(None), slice(start, stop))
            return loader.fused((spec.num_key_heads, stop, tail), parts)

        return GatedDeltaNet(
            spec,
            inner=by_key_head("proj", tuple(sizes), self._model.hidden_size),
            conv=by_key_head("conv", ("q", "k", "v"), spec.kernel_size),
            decay_log=loader.tensor(prefix + "decay_log", np.float32),
            decay_bias=loader.tensor(prefix + "decay_bias", np.float32),
            norm=loader.norm(prefix + "norm", spec.norm),
            out=loader.tensor(prefix + "o_proj.weight"),
            backend=self._backend,
        )

    def _latent(self, spec: LatentAttentionSpec, prefix: str) -> LatentAttention:
        loader, head = self._loader, spec.nope_dim + spec.rope_dim
        source = "q_proj" if spec.query_rank is None else "q_b_proj"
        num_inputs = self._model.hidden_size if spec.query_rank is None else spec.query_rank
        query, down = f"{prefix}{source}.weight", f"{prefix}kv_a_proj_with_mqa"
        in_head = partial(_reordered, order=_rotary_order(spec.rope, spec.nope_dim, head), head_dim=head, tail=(num_inputs,))
        order = _rotary_order(spec.rope, spec.kv_rank, spec.head_dim)
        in_down = partial(_reordered, order=order, head_dim=spec.head_dim, tail=(self._model.hidden_size,))
        in_bias = partial(_reordered, order=order, head_dim=spec.head_dim)
        key_shape = (spec.num_heads, spec.kv_rank, spec.nope_dim)
        value_shape = (spec.num_heads, spec.value_dim, spec.kv_rank)

        def up(is_key: bool, array: np.ndarray) -> np.ndarray:
            heads = array.reshape(spec.num_heads, -1, spec.kv_rank)
            return heads[:, : spec.nope_dim].swapaxes(1, 2) if is_key else heads[:, spec.nope_dim :]

        biases = {}
        if spec.has_bias:
            biases = {"kv_down": loader.fused((spec.head_dim,), {down + ".bias": ()}, {down + ".bias": in_bias})}
            biases["out"] = loader.tensor(prefix + "o_proj.bias")
            if spec.query_rank is not None:
                biases["query_down"] = loader.tensor(prefix + "q_a_proj.bias")
        kv_up = prefix + "kv_b_proj.weight"
        is_low_rank = spec.query_rank is not None
        return LatentAttention(
            spec,
            query=loader.fused((spec.num_heads, head, num_inputs), {query: ()}, {query: in_head}),
            query_down=loader.tensor(prefix + "q_a_proj.weight") if is_low_rank else None,
            query_norm=loader.norm(prefix + "q_a_layernorm", spec.norm) if is_low_rank else None,
            kv_down=loader.fused((spec.head_dim, self._model.hidden_size), {down + ".weight": ()}, {down + ".weight": in_down}),
            kv_norm=loader.norm(prefix + "kv_a_layernorm", spec.norm),
            key_up=loader.fused(key_shape, {kv_up: ()}, {kv_up: partial(up, True)}),
            value_up=loader.fused(value_shape, {kv_up: ()}, {kv_up: partial(up, False)}),
            out=loader.tensor(prefix + "o_proj.weight"),
            biases=biases,
            backend=self._backend,
        )

    def _attention(self, spec: AttentionSpec, prefix: str) -> Attention:
        loader = self._loader
        norm = None if spec.qk_norm is None else spec.qk_norm.norm
        order = None if spec.rope is None else _rotary_order(spec.rope, 0, spec.head_dim)
        q_norm = k_norm = None
        if norm is not None and spec.qk_norm is not None:
            has_weight, in_order = spec.qk_norm.scope != "plain", partial(_reordered, order=order, head_dim=spec.head_dim)
            # Heads that are normalized together are on several devices.
            axis = AXIS if spec.qk_norm.scope == "all" and loader.shards.count > 1 else None
            q_norm = loader.norm(prefix + "q_norm", norm, in_order, axis=axis) if has_weight else Norm(norm, None)
            k_norm = loader.norm(prefix + "k_norm", norm, in_order, axis=axis) if has_weight else Norm(norm, None)
        return Attention(
            spec,
            qkv=self._qkv(spec, "weight", (self._model.hidden_size,), order),
            out=loader.tensor(prefix + "o_proj.weight"),
            qkv_bias=self._qkv(spec, "bias", (), order) if spec.has_qkv_bias else None,
            out_bias=loader.tensor(prefix + "o_proj.bias") if spec.has_out_bias else None,
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=loader.tensor(prefix + "sinks", np.float32) if spec.has_sinks else None,
            backend=self._backend,
        )

    def _qkv(self, spec: AttentionSpec, kind: str, tail: tuple[int, ...], order: np.ndarray | None) -> jax.Array:
        """Query, key, value and gate projections in one array, see `Attention`."""
        every, g = slice(None), spec.num_query_groups
        places: dict[str, tuple[int | slice, ...]] = {"q": (every, slice(g)), "k": (every, g), "v": (every, g + 1)}
        if spec.has_gate:
            places["gate"] = (every, slice(g + 2, None))
        shape = (spec.num_kv_heads, (2 if spec.has_gate else 1) * g + 2, spec.head_dim, *tail)
        in_order = partial(_reordered, order=order, head_dim=spec.head_dim, tail=tail)
        parts = {f"{self._prefix}self_attn.{name}_proj.{kind}": place for name, place in places.items()}
        return self._loader.fused(shape, parts, dict.fromkeys(list(parts)[:2], in_order))

    def _mlp(self) -> MLP | MoE:
        spec, prefix = self._spec.mlp, self._prefix + "mlp."
        return self._moe(spec, prefix) if isinstance(spec, MoESpec) else self._dense(spec, prefix)

    def _dense(self, spec: MLPSpec, prefix: str) -> MLP:
        loader = self._loader
        parts = ("gate", "up") if spec.is_gated else ("up",)

        def inner(kind: str, *tail: int) -> jax.Array:
            return loader.fused((len(parts), spec.size, *tail), {f"{prefix}{name}_proj.{kind}": (i,) for i, name in enumerate(parts)})

        return MLP(
            spec.activation,
            inner=inner("weight", self._model.hidden_size),
            down=loader.tensor(prefix + "down_proj.weight"),
            inner_bias=inner("bias") if spec.has_bias else None,
            down_bias=loader.tensor(prefix + "down_proj.bias") if spec.has_bias else None,
            backend=self._backend,
        )

    def _moe(self, spec: MoESpec, prefix: str) -> MoE:
        loader, d, f = self._loader, self._model.hidden_size, spec.size
        num_experts = loader.num_experts(spec)

        def inner(kind: str, *tail: int) -> jax.Array:
            halves = (("gate", slice(f)), ("up", slice(f, None)))
            parts = {f"{prefix}experts.{e}.{name}_proj.{kind}": (e, half) for e in range(num_experts) for name, half in halves}
            return loader.fused((num_experts, 2 * f, *tail), parts)

        def down(kind: str, *tail: int) -> jax.Array:
            parts = {f"{prefix}experts.{e}.down_proj.{kind}": (e,) for e in range(num_experts)}
            return loader.fused((num_experts, d, *tail), parts)

        shared = None
        if spec.shared_size is not None:
            shared = self._dense(MLPSpec(size=spec.shared_size, activation=spec.activation), prefix + "shared_expert.")
        return MoE(
            spec,
            router=loader.tensor(prefix + "router.weight", np.float32),
            inner=inner("weight", d),
            down=down("weight", f),
            router_bias=loader.tensor(prefix + "router.bias", np.float32) if spec.has_router_bias else None,
            score_bias=loader.tensor(prefix + "router.score_bias", np.float32) if spec.has_score_bias else None,
            inner_bias=inner("bias") if spec.has_expert_bias else None,
            down_bias=down("bias") if spec.has_expert_bias else None,
            shared=shared,
            shared_gate=loader.tensor(prefix + "shared_expert_gate.weight") if spec.has_shared_gate else None,
            backend=self._backend,
            shards=loader.shards,
        )


def _rotary_order(rope: RopeSpec, start: int, head_dim: int) -> np.ndarray | None:
    """Where each dimension of a head comes from, so that `rope.rotate` finds a pair's halves where it looks; None changes nothing.

    `start` is the first rotated dimension. Queries and keys are reordered alike, which leaves their dot products as they are.
    """
    if not rope.is_interleaved:
        return None
    stop = start + rope.rotary_dim
    return np.concatenate([np.arange(start), np.arange(start, stop, 2), np.arange(start + 1, stop, 2), np.arange(stop, head_dim)])


def _reordered(array: np.ndarray, *, order: np.ndarray | None, head_dim: int, tail: tuple[int, ...] = ()) -> np.ndarray:
    """The array, heads one after the other with `tail` axes behind, with the dimensions of every head in another order."""
    return array if order is None else array.reshape(-1, head_dim, *tail)[:, order].reshape(array.shape)
