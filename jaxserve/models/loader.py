"""Puts logical tensors where a model runs, fused and cast: on one device, in parts on the devices of a mesh, or nowhere (shapes alone).

The three loaders give a layer's builder (`load.py`) the same verbs. A weight on a mesh is one global array: what the devices hold, one
behind the other along the first axis. Only the parts mean anything: inside `shard_map` each device sees its own. Which part of a tensor a
device holds is said in `shards.py`; where tensors come from is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxserve.errors import CheckpointError
from jaxserve.models.host_memory import HostMemory
from jaxserve.models.norm import Norm
from jaxserve.models.shards import AXIS, UNCUT, Shards, num_local_experts, num_vocab_rows, shard_spec, tensor_parts
from jaxserve.models.spec import ModelSpec, MoESpec, NormSpec
from jaxserve.models.tensors import OPTIONAL, tensor_shapes

Read = Callable[[str], np.ndarray]
"""Gives a logical tensor by name, of any float dtype; raises KeyError for one that is not there."""
Change = Callable[[np.ndarray], np.ndarray]
Place = tuple[int | slice, ...]


class TensorSource(Protocol):
    """Logical tensors by name, whole or some rows of one, such as `checkpoint.Checkpoint`. KeyError: it is not there."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The tensor, or the rows of a slice with start and stop, of any float dtype."""


class Loader:
    """Reads logical tensors, checks their shapes, casts them and puts them on one device.

    Attributes:
        spec: What one device computes.
        shards: How many devices there are.
    """

    shards = UNCUT

    def __init__(self, spec: ModelSpec, read: Read, dtype: np.dtype[Any], device: jax.Device | None) -> None:
        self.spec = spec
        self._shapes = dict(tensor_shapes(spec))
        self._read, self._dtype, self._device = read, dtype, device
        # On CPU the device's arrays are these very ones.
        is_cpu = (device or jax.devices()[0]).platform == "cpu"
        self._empty = HostMemory().empty if is_cpu else np.empty

    def num_experts(self, spec: MoESpec) -> int:
        """Experts that a device has of a layer; the loader's names count from the first of them."""
        return num_local_experts(spec, self.shards)

    def tensor(self, name: str, dtype: DTypeLike | None = None) -> jax.Array:
        """One tensor as it is, in the weights' dtype or the given one."""
        return self.fused(self._shapes[name], {name: ()}, dtype=dtype)

    def optional(self, name: str) -> jax.Array | None:
        """One tensor, or None where the checkpoint lacks it."""
        try:
            return self.tensor(name)
        except KeyError:
            return None

    def norm(self, name: str, spec: NormSpec, change: Change | None = None, *, axis: str | None = None) -> Norm:
        """One normalization; `change` is applied to its weight and bias."""
        parts = {"weight": spec.has_weight, "bias": spec.has_bias}
        names = [f"{name}.{part}" if is_there else None for part, is_there in parts.items()]
        arrays = [None if n is None else self.fused(self._shapes[n], {n: ()}, {n: change} if change else {}) for n in names]
        return Norm(spec, *arrays, axis=axis)

    def fused(
        self,
        shape: tuple[int, ...],
        parts: Mapping[str, Place],
        changes: Mapping[str, Change] | None = None,
        dtype: DTypeLike | None = None,
    ) -> jax.Array:
        """Several tensors in one array of `shape`, each at its place, after its change where it has one; together they fill it."""
        return jax.device_put(self._filled(shape, parts, changes, dtype, [self._read])[0], self._device)

    def _filled(
        self,
        shape: tuple[int, ...],
        parts: Mapping[str, Place],
        changes: Mapping[str, Change] | None,
        dtype: DTypeLike | None,
        reads: Sequence[Read],
    ) -> list[np.ndarray]:
        """For each of `reads` the fused array on the host; every tensor is read by all of them before the next one."""
        filled = [self._empty(shape, self._dtype if dtype is None else dtype) for _ in reads]
        assert sum(filled[0][place].size for place in parts.values()) == filled[0].size, (shape, parts)
        for name, place in parts.items():
            for fused, read in zip(filled, reads, strict=True):
                array = self._checked(name, read)
                if changes and name in changes:
                    array = changes[name](array)
                view = fused[place]
                view[...] = array.reshape(view.shape)
        return filled

    def _checked(self, name: str, read: Read) -> np.ndarray:
        try:
            array = read(name)
        except KeyError:
            if name == OPTIONAL:
                raise
            raise CheckpointError(f"The checkpoint has no tensor {name}; convert it again.") from None
        if array.shape != self._shapes[name]:
            raise _wrong_shape(name, array.shape, self._shapes[name])
        return array


class MeshLoader(Loader):
    """Gives every device of a mesh its part of each weight.

    Rows of a tensor that belong to one device are read for it alone, and the host holds one device's share of a weight at a time. A tensor
    that all need, or that is cut across its rows, is read once and whole; then the host holds the weight for all devices.
    """

    def __init__(self, spec: ModelSpec, source: TensorSource, dtype: np.dtype[Any], mesh: Mesh, shards: Shards) -> None:
        assert mesh.shape == {AXIS: shards.count}, (mesh, shards)
        self.shards, self._devices = shards, list(mesh.devices.flat)
        shard = shard_spec(spec, shards)
        super().__init__(replace(shard, vocab_size=num_vocab_rows(spec, shards)), source.read, dtype, self._devices[0])
        self.spec = shard
        self._source, self._sharding = source, NamedSharding(mesh, PartitionSpec(AXIS))
        self._parts = tensor_parts(spec, shards)
        self._whole = dict(tensor_shapes(spec))
        self._kept: tuple[str, np.ndarray] | None = None

    def fused(
        self,
        shape: tuple[int, ...],
        parts: Mapping[str, Place],
        changes: Mapping[str, Change] | None = None,
        dtype: DTypeLike | None = None,
    ) -> jax.Array:
        """As `Loader.fused`, for each device from its own parts; `shape` is one device's."""
        reads = [partial(self._part, device_id=i) for i in range(len(self._devices))]
        are_rows = all(self._parts[name].axis == 0 or self._has_own(name) for name in parts)
        arrays: list[jax.Array] = []
        for some in [reads[i : i + 1] for i in range(len(reads))] if are_rows else [reads]:
            filled = self._filled(shape, parts, changes, dtype, some)
            arrays += [jax.device_put(array, self._devices[len(arrays) + i]) for i, array in enumerate(filled)]
        self._kept = None
        return jax.make_array_from_single_device_arrays((len(arrays) * shape[0], *shape[1:]), self._sharding, arrays)

    def _part(self, name: str, device_id: int) -> np.ndarray:
        """What a device holds of a tensor; an expert's name counts from the device's first one."""
        if self._has_own(name):
            name = self._named_globally(name, device_id)
        shape, part = self._source.shape(name), self._parts[name]
        if shape != self._whole[name]:
            raise _wrong_shape(name, shape, self._whole[name])
        if part.axis is None:
            whole = self._read_whole(name)
            return np.zeros_like(whole) if part.is_first_only and device_id else whole
        start = min(device_id * part.num_parts // self.shards.count * part.size, shape[part.axis])
        stop = min(start + part.size, shape[part.axis])
        if part.axis == 1:
            return self._read_whole(name)[:, start:stop]
        rows = self._source.read(name, slice(start, stop))
        num_missing = part.size - len(rows)  # rows past the vocabulary
        return np.concatenate([rows, np.zeros((num_missing, *shape[1:]), rows.dtype)]) if num_missing else rows

    def _has_own(self, name: str) -> bool:
        """Whether each device has an expert of its own by that name."""
        return self.shards.has_expert_parallel and ".experts." in name

    def _named_globally(self, name: str, device_id: int) -> str:
        before, _, after = name.partition(".experts.")
        expert, _, rest = after.partition(".")
        layer = int(before.split(".")[1])
        mlp = self.spec.layers[layer].mlp
        assert isinstance(mlp, MoESpec), name
        return f"{before}.experts.{device_id * self.num_experts(mlp) + int(expert)}.{rest}"

    def _read_whole(self, name: str) -> np.ndarray:
        """The whole tensor, kept while the devices take their parts of it."""
        if self._kept is None or self._kept[0] != name:
            self._kept = name, self._source.read(name)
        return self._kept[1]


class AbstractLoader(Loader):
    """Gives the shapes and dtypes that another loader's arrays would have: programs can be compiled from them with no weights at hand."""

    def __init__(self, spec: ModelSpec, dtype: np.dtype[Any], shards: Shards) -> None:
        self.spec, self.shards, self._dtype = shard_spec(spec, shards), shards, dtype
        self._shapes = dict(tensor_shapes(replace(self.spec, vocab_size=num_vocab_rows(spec, shards))))

    def fused(
        self,
        shape: tuple[int, ...],
        parts: Mapping[str, Place],
        changes: Mapping[str, Change] | None = None,
        dtype: DTypeLike | None = None,
    ) -> Any:
        """The shape of what `Loader.fused`, or with several shards `MeshLoader.fused`, would give."""
        return jax.ShapeDtypeStruct((self.shards.count * shape[0], *shape[1:]), self._dtype if dtype is None else dtype)


def _wrong_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"Tensor {name} has shape {found}; the config says {wanted}.")
