"""How several engines of one server share a machine: GPUs, or cores and memory where the model runs on the CPU. Loads no JAX.

On GPUs each engine sees tensor_parallel_size of them and no others, also where it is the only one: JAX takes memory on every card it sees.
On the CPU each gets an equal part of the threads and of the memory that is free before the first one starts: a fixed amount, so that one
that is started again finds the room it had; one that is alone takes what it finds. Next: `supervisor`, which starts them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.cgroup import free_memory, usable_cores
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.nvidia import VISIBLE_DEVICES, choose_platform, cuda_plugin, nvidia_driver, visible_gpus


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one engine may take.

    Attributes:
        environment: Variables of its process.
        num_threads: CPU threads; None leaves the setting as it is.
        max_host_bytes: Memory of the machine; None is all that is free.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    num_threads: int | None = None
    max_host_bytes: int | None = None


def shares(config: EngineConfig, count: int) -> list[Share]:
    """One share for each of `count` engines.

    Raises:
        ConfigError: There are too few GPUs, or GPUs that JAX cannot use.
    """
    platform = choose_platform(config.device, nvidia_driver(), cuda_plugin(), os.environ.get("JAX_PLATFORMS", ""))
    if platform == "cpu":
        if count == 1:
            return [Share()]
        num_threads = config.num_threads or max(1, usable_cores() // count)
        return [Share(num_threads=num_threads, max_host_bytes=free_memory() // count)] * count
    size, gpus = config.tensor_parallel_size, visible_gpus()
    if count == 1 and len(gpus) <= size:
        return [Share()]  # if that is too few, JAX knows better how many there are
    if count * size > len(gpus):
        raise ConfigError(
            f"data_parallel_size is {count} and tensor_parallel_size {size}: that takes {count * size} GPUs, and there are {len(gpus)} "
            f"({VISIBLE_DEVICES}={','.join(gpus)}). Give --data-parallel-size {len(gpus) // size} or a smaller --tensor-parallel-size."
            if len(gpus) >= size
            else f"tensor_parallel_size is {size}, and there are {len(gpus)} GPUs; give a smaller --tensor-parallel-size."
        )
    return [Share(environment={VISIBLE_DEVICES: ",".join(gpus[i * size : (i + 1) * size])}) for i in range(count)]
