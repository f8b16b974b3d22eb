"""Where a step's arrays live: whole on one device, or over the devices of a mesh, each with its part of weights and memory.

On a mesh every program is one `shard_map`: each device runs the traced code on its own heads, experts and vocabulary (`models.shards`)
and all come to the same tokens. So nothing is left for XLA to partition, and kernels see plain arrays. On one device programs are as they
would be without this file. Next: `runner.runner`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.arrays import RecurrentState
from jaxserve.models.shards import AXIS
from jaxserve.models.spec import LatentAttentionSpec, ModelSpec

WHOLE = PartitionSpec()
WEIGHT = PartitionSpec(AXIS)
"""What the devices hold lies one behind the other along the first axis; see `models.loader`."""


def memory_partition(spec: ModelSpec) -> tuple[Any, ...]:
    """How pages, slots, penalties and recurrent states are cut: by heads, but for latent pages, which the heads share."""
    pages = WHOLE if isinstance(spec.paged_attention, LatentAttentionSpec) else PartitionSpec(None, None, AXIS)
    state: Any = RecurrentState(conv=cast(Any, PartitionSpec(None, None, AXIS)), matrix=cast(Any, PartitionSpec(None, AXIS)))
    return pages, WHOLE, WHOLE, (state,) * len(spec.recurrent_layers)


def gpu_options(xla_flags: str) -> dict[str, str]:
    """How programs for GPUs are compiled, beside what the user's XLA_FLAGS say, of which this option would replace the like.

    Pages fill the memory on purpose. XLA takes that for a program that is too large, and computes and reads a part of it twice.
    """
    disabled = re.findall(r"--xla_disable_hlo_passes=(\S+)", xla_flags)
    return {"xla_disable_hlo_passes": ",".join(["rematerialization", *disabled])}


def device_mesh(devices: Sequence[jax.Device]) -> Mesh | None:
    """The mesh of devices that share a model; None for one device, which needs none."""
    return None if len(devices) == 1 else Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


class Placement:
    """One device, or a mesh. The devices of a mesh may be those of a topology: then programs can be lowered and nothing else."""

    def __init__(self, device: jax.Device | None, mesh: Mesh | None) -> None:
        assert device is not None or mesh is not None, "neither device nor mesh"
        self.device, self.mesh = device, mesh
        self.is_shared = mesh is not None and mesh.size > 1
        first: Any = device if mesh is None else mesh.devices.flat[0]
        self._is_cpu = first.platform == "cpu"

    def whole(self, partition: Any, parts: Any) -> Any:
        """Shapes of the arrays whose parts on one device have the shapes `parts`; `partition` is a prefix of that tree."""
        return jax.tree.map(lambda spec, tree: jax.tree.map(lambda part: self._whole(spec, part), tree), partition, parts)

    def placed(self, partition: PartitionSpec, array: Any) -> jax.ShapeDtypeStruct:
        """The shape of a whole array, with where it lives."""
        sharding = None if self.mesh is None else NamedSharding(self.mesh, partition if self.is_shared else WHOLE)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    def zeros(self, shape: jax.ShapeDtypeStruct) -> jax.Array:
        """A new array of zeros."""
        return jnp.zeros(shape.shape, shape.dtype, device=self.device if shape.sharding is None else shape.sharding)

    def program(self, function: Callable[..., Any], inputs: Any, outputs: Any, *, donated: int | tuple[int, ...]) -> Any:
        """The jitted function; `inputs` and `outputs` say how its arguments and results are cut."""
        if self.is_shared:
            function = jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        options = None if self._is_cpu else gpu_options(os.environ.get("XLA_FLAGS", ""))
        return jax.jit(function, donate_argnums=donated, compiler_options=options)

    @contextmanager
    def lowering(self) -> Iterator[None]:
        """To lower inside of: kernels learn there what device they are for, also where this machine has none.

        A GPU would multiply float32 as TF32, with 10 bits of fraction: then --dtype float32 would not be float32. Products of 16 bits are
        the same either way.
        """
        with ExitStack() as stack:
            if self.mesh is not None:
                stack.enter_context(jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh))
            if not self._is_cpu:
                stack.enter_context(jax.default_matmul_precision("highest"))
            yield

    def _whole(self, partition: PartitionSpec, part: Any) -> jax.ShapeDtypeStruct:
        shape = list(part.shape)
        if self.is_shared and self.mesh is not None:
            for axis, name in enumerate(partition):
                shape[axis] *= self.mesh.size if name == AXIS else 1
        return self.placed(partition, jax.ShapeDtypeStruct(tuple(shape), part.dtype))
