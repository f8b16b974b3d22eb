"""Compiles for NVIDIA cards that are not here: needs `jax[cuda12]` and JAX_PLATFORMS=cpu, but neither a GPU nor a driver.

A target config tells XLA what it would otherwise ask the driver. No autotuning happens without a card, so what comes out is for checks
(does it compile, which memory, which copies, how many kernels), not for serving. Does not know the kernels: their tests call
`compile_for`. Next: `paged_attention/test_triton.py`, and `tests/deviceless` for whole steps.
"""

from __future__ import annotations

import functools
import importlib.util
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What XLA, and a kernel's author, must know of a card.

    Attributes:
        capability: Compute capability.
        num_cores: Streaming multiprocessors.
        shared_memory_bytes: What one block may have at most (the driver's "opt-in" limit).
        shared_memory_per_core_bytes: What the blocks of a core share.
        threads_per_core: Resident at once.
        fpus_per_core: float32 units.
        bandwidth: Of its memory, bytes a second, as its data sheet says.
        memory_bytes: Device memory.
        l2_bytes: Second-level cache.
        clock_ghz: Highest clock.
        is_specific: Its instruction set has an "a" variant, which wgmma and tcgen05 need (sm_90a).
    """

    name: str
    capability: tuple[int, int]
    num_cores: int
    shared_memory_bytes: int
    shared_memory_per_core_bytes: int
    threads_per_core: int
    fpus_per_core: int
    bandwidth: int
    memory_bytes: int
    l2_bytes: int
    clock_ghz: float
    is_specific: bool = False

    def target_config(self) -> str:
        """The card as the text proto that XLA's CUDA compiler reads."""
        major, minor = self.capability
        feature = " feature_extension: ACCELERATED_FEATURES" if self.is_specific else ""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core_bytes}
  threads_per_core_limit: {self.threads_per_core}
  core_count: {self.num_cores}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.shared_memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.name}"
"""


_CARDS = (
    Card(
        name="NVIDIA H200", capability=(9, 0), num_cores=132, shared_memory_bytes=232448, shared_memory_per_core_bytes=233472,
        threads_per_core=2048, fpus_per_core=128, bandwidth=4_800_000_000_000, memory_bytes=150754820096, l2_bytes=52428800,
        clock_ghz=1.98, is_specific=True,
    ),
    Card(
        name="NVIDIA A100-SXM4-80GB", capability=(8, 0), num_cores=108, shared_memory_bytes=166912, shared_memory_per_core_bytes=167936,
        threads_per_core=2048, fpus_per_core=64, bandwidth=2_039_000_000_000, memory_bytes=85094825984, l2_bytes=41943040,
        clock_ghz=1.41,
    ),
    Card(
        name="NVIDIA A10", capability=(8, 6), num_cores=72, shared_memory_bytes=101376, shared_memory_per_core_bytes=102400,
        threads_per_core=1536, fpus_per_core=128, bandwidth=600_000_000_000, memory_bytes=24 * 10**9, l2_bytes=6291456,
        clock_ghz=1.695,
    ),
    Card(
        name="NVIDIA L40", capability=(8, 9), num_cores=142, shared_memory_bytes=101376, shared_memory_per_core_bytes=102400,
        threads_per_core=1536, fpus_per_core=128, bandwidth=864_000_000_000, memory_bytes=48 * 10**9, l2_bytes=100663296,
        clock_ghz=2.49,
    ),
    Card(
        name="NVIDIA B200", capability=(10, 0), num_cores=148, shared_memory_bytes=232448, shared_memory_per_core_bytes=233472,
        threads_per_core=2048, fpus_per_core=128, bandwidth=8_000_000_000_000, memory_bytes=191514017792, l2_bytes=132644864,
        clock_ghz=1.965, is_specific=True,
    ),
    Card(
        name="NVIDIA RTX PRO 6000", capability=(12, 0), num_cores=188, shared_memory_bytes=101376,
        shared_memory_per_core_bytes=102400, threads_per_core=1536, fpus_per_core=128, bandwidth=1_792_000_000_000,
        memory_bytes=102641958912, l2_bytes=134217728, clock_ghz=2.617, is_specific=True,
    ),
)  # fmt: skip

CARDS: dict[str, Card] = dict(zip(("H200", "A100", "A10", "L40", "B200", "RTX_PRO_6000"), _CARDS, strict=True))
"""By short name: capability 9.0, 8.0, 8.6, 8.9, 10.0 and 12.0. JAX knows a card that is not there by its name, and few names."""


def unavailable_reason() -> str | None:
    """Why this environment cannot compile for a card, or None. For the `skipif` of a test module."""
    for name in ("jax_plugins.xla_cuda12", "jax_triton"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"needs the cuda12 extra ({name} is not installed): scripts/gates has an environment for it"
    if jax.config.jax_platforms != "cpu":
        return "needs JAX_PLATFORMS=cpu: otherwise the plugin looks for a driver"
    return None


@functools.cache
def topology(card: str, num_devices: int = 1) -> topologies.TopologyDescription:
    """`num_devices` cards of one host, as JAX sees them. Raises KeyError for a name that `CARDS` lacks."""
    return topologies.get_topology_desc(platform="cuda", target_config=CARDS[card].target_config(), topology=f"1x1x{num_devices}")


def mesh(card: str, num_devices: int = 1, axis: str = "tp") -> Mesh:
    """A mesh of one axis over the cards of `topology`."""
    return Mesh(topology(card, num_devices).devices, (axis,), axis_types=(AxisType.Auto,))


def lower_for(mesh: Mesh, function: Callable[..., Any], *args: Any, **jit_options: Any) -> jax.stages.Lowered:
    """`jax.jit(function, **jit_options)` lowered for the cards of `mesh`.

    Args:
        mesh: From `mesh`; kernels ask it for the card.
        function: Traced once.
        args: Pytrees of arrays or ShapeDtypeStructs; those that name no sharding are replicated.
        jit_options: `donate_argnums` and the like.
    """

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, **jit_options).lower(*jax.tree.map(placed, args))


def compile_for(card: str, function: Callable[..., Any], *args: Any, **jit_options: Any) -> jax.stages.Compiled:
    """`function` compiled for one card, by shape only; see `lower_for`. Its `as_text()` is scheduled HLO.

    Raises:
        KeyError: no such card.
        ValueError: a Triton kernel takes more shared memory than a block of this card has.
        Exception: whatever the compiler or the assembler refuses.
    """
    lowered = lower_for(mesh(card), function, *args, **jit_options)
    limit = CARDS[card].shared_memory_bytes
    if too_large := {name: size for name, size in shared_memory_bytes(lowered).items() if size > limit}:
        raise ValueError(f"more shared memory than the {limit} bytes of a block on {CARDS[card].name}: {too_large}")
    return lowered.compile()


def shared_memory_bytes(lowered: jax.stages.Lowered) -> dict[str, int]:
    """Of each Triton kernel that a lowered program calls, by name (the largest, where several share one): bytes for each block.

    No compiler looks at this before the launch. Mosaic does check its own kernels, as it lowers them.
    """
    found: dict[str, int] = {}
    for target, payload in kernel_payloads(lowered):
        if "triton" in target:
            name, size = triton_kernel(payload)
            found[name] = max(found.get(name, 0), size)
    return found


def triton_kernel(payload: bytes) -> tuple[str, int]:
    """Name and bytes of shared memory of a Triton kernel, as its custom call carries it."""
    # A TritonAnyKernelCall: its kernel_call's kernel, which has the name as field 1 and the shared memory as field 3.
    kernel = _proto_fields(_proto_fields(_proto_fields(zlib.decompress(payload))[1])[1])
    return bytes(kernel[1]).decode(), int(kernel.get(3, 0))


def kernel_payloads(lowered: jax.stages.Lowered) -> set[tuple[str, bytes]]:
    """The different kernels of ours in a lowered program: the custom call's target, and the kernel as it travels (Mosaic's: a hash)."""
    found = set()

    def visit(operation: Any) -> Any:
        attributes = operation.operation.attributes
        if operation.operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(attributes["call_target_name"]).value
            if field := {"triton_kernel_call_ffi": "opaque", "mosaic_gpu_v2": "kernel_hash"}.get(target):
                found.add((target, ir.StringAttr(attributes["mhlo.backend_config"][field]).value_bytes))
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir()
    module.operation.walk(visit)
    return found


def _proto_fields(message: bytes) -> dict[int, Any]:
    """The fields of a protocol buffer by number: integers and bytes; of repeated ones the last."""
    fields: dict[int, Any] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            fields[number] = varint()
        elif kind == 2:
            size = varint()
            fields[number] = message[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}[kind]
    return fields
