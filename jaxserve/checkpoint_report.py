"""Describes a converted checkpoint in lines for people; `jaxserve inspect` prints them. Reads the manifest only."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from jaxserve.checkpoint import Manifest, open_checkpoint
from jaxserve.models.registry import resolve_spec
from jaxserve.models.spec import ModelSpec, RopeSpec


def describe(path: str | Path) -> list[str]:
    """Provenance, model, sizes, and the tensors with layers of equal shape folded into one line."""
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest
    spec = resolve_spec(checkpoint.config)
    lines = [
        f"{checkpoint.path}",
        f"  format       version {manifest.format_version}, {manifest.layout} tensors, quantization {manifest.quantization}, "
        f"by {manifest.created_by}",
        f"  source       {manifest.source} ({manifest.source_kind}{f', revision {manifest.revision}' if manifest.revision else ''})",
        *(f"               {file.name}, {size(file.num_bytes)}, sha256 {file.sha256}" for file in manifest.source_files),
        f"  model        {', '.join(manifest.architectures)} (family {manifest.family})",
        f"  shape        {_shape(spec)}",
        f"  positions    {spec.derived_max_model_len} tokens, {', '.join(map(_rope, spec.ropes)) or 'no RoPE'}",
        f"  end tokens   {sorted(checkpoint.eos_token_ids)}",
        f"  size         {manifest.num_parameters:,} parameters in {manifest.num_tensors} tensors, {size(manifest.num_bytes)}, "
        f"{manifest.dtype}",
        *(f"  left out     {i.count} tensors, {size(i.num_bytes)}, matching {i.pattern}" for i in manifest.ignored),
        "  tensors",
    ]
    return lines + [f"    {line}" for line in _tensor_lines(manifest)]


def _shape(spec: ModelSpec) -> str:
    attention, mlp = spec.paged_attention, spec.layers[-1].mlp
    kinds = [f"{group.num_layers} layers with a window of {group.window}" for group in spec.kv_groups if group.window is not None]
    if spec.recurrent_layers:
        kinds.append(f"{len(spec.recurrent_layers)} recurrent layers")
    return (
        f"{spec.num_layers} layers, hidden {spec.hidden_size}, {attention.num_heads} heads of {attention.head_dim}, "
        f"{spec.page_shape[1]} KV heads, MLP {mlp.size}, vocabulary {spec.vocab_size}, {'tied' if spec.head.is_tied else 'untied'} head"
        + "".join(f", {kind}" for kind in kinds)
    )


def _rope(rope: RopeSpec) -> str:
    return f"{rope.kind} RoPE, theta {rope.theta:g}" + (" with stored divisors" if rope.freq_divisors else "")


def size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that keeps the number at least 1."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _tensor_lines(manifest: Manifest) -> list[str]:
    groups: dict[tuple[str, tuple[int, ...], str], list[int]] = defaultdict(list)
    for name, entry in manifest.tensors.items():
        groups[re.sub(r"\b\d+\b", "*", name), entry.shape, entry.dtype].append(entry.num_bytes)
    return [
        f"{name}  {dtype} {list(shape)}" + (f" x {len(sizes)}" if len(sizes) > 1 else "") + f"  {size(sum(sizes))}"
        for (name, shape, dtype), sizes in groups.items()
    ]
