"""Describes a converted checkpoint in lines for people; `jaxserve inspect` prints them. Reads the manifest only."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from jaxserve.checkpoint import Manifest, open_checkpoint
from jaxserve.models.registry import resolve_spec


def describe(path: str | Path) -> list[str]:
    """Provenance, model, sizes, and the tensors with layers of equal shape folded into one line."""
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest
    spec = resolve_spec(checkpoint.config)
    rope = f"{spec.rope.kind} RoPE, theta {spec.rope.theta:g}" + (" with stored divisors" if spec.rope.freq_divisors else "")
    lines = [
        f"{checkpoint.path}",
        f"  format       version {manifest.format_version}, {manifest.layout} tensors, quantization {manifest.quantization}, "
        f"by {manifest.created_by}",
        f"  source       {manifest.source} ({manifest.source_kind}{f', revision {manifest.revision}' if manifest.revision else ''})",
        *(f"               {file.name}, {size(file.num_bytes)}, sha256 {file.sha256}" for file in manifest.source_files),
        f"  model        {', '.join(manifest.architectures)} (family {manifest.family})",
        f"  shape        {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_heads} heads of {spec.head_dim}, "
        f"{spec.num_kv_heads} KV heads, MLP {spec.mlp_size}, vocabulary {spec.vocab_size}, {'tied' if spec.is_tied else 'untied'} head",
        f"  positions    {spec.derived_max_model_len} tokens, {rope}",
        f"  end tokens   {sorted(checkpoint.eos_token_ids)}",
        f"  size         {manifest.num_parameters:,} parameters in {manifest.num_tensors} tensors, {size(manifest.num_bytes)}, "
        f"{manifest.dtype}",
        *(f"  left out     {i.count} tensors, {size(i.num_bytes)}, matching {i.pattern}" for i in manifest.ignored),
        "  tensors",
    ]
    return lines + [f"    {line}" for line in _tensor_lines(manifest)]


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
