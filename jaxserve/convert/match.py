"""Finds each logical tensor of a model in a source checkpoint, and accounts for every source tensor.

A missing, wrongly shaped or unexpected tensor is an error that names it: each would mean that the model is not the one its
config describes. Knows no file format; go on to `write_orbax.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jaxserve.checkpoint import IgnoredTensors
from jaxserve.convert.source import SourceTensor, listed
from jaxserve.errors import CheckpointError
from jaxserve.models.spec import TensorSpec


def match_tensors(
    wanted: Sequence[TensorSpec], tensors: Mapping[str, SourceTensor], ignored_patterns: Sequence[str]
) -> tuple[list[tuple[TensorSpec, SourceTensor]], list[IgnoredTensors]]:
    """Pairs each wanted tensor with its source, in order; optional ones that are absent have no pair.

    Returns:
        The pairs, and for each pattern that left something out, how many tensors and bytes.

    Raises:
        CheckpointError: Names all missing, wrongly shaped and unexpected tensors.
    """
    pairs: list[tuple[TensorSpec, SourceTensor]] = []
    missing = []
    for spec in wanted:
        source = next((tensors[name] for name in spec.sources if name in tensors), None)
        if source is not None:
            pairs.append((spec, source))
        elif not spec.is_optional:
            missing.append(f"{spec.name} {list(spec.shape)}")
    wrong = [f"{source.name} is {list(source.shape)}, not {list(spec.shape)}" for spec, source in pairs if spec.shape != source.shape]
    used = {source.name for _, source in pairs}
    unexpected, ignored = _account([tensor for name, tensor in tensors.items() if name not in used], ignored_patterns)
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {listed(missing)}")
    if wrong:
        problems.append(f"{len(wrong)} of another shape than the config says: {listed(wrong)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {listed(unexpected)}")
    if problems:
        raise CheckpointError(f"The weights do not fit the config. Tensors {'; '.join(problems)}.")
    return pairs, ignored


def _account(left: Sequence[SourceTensor], patterns: Sequence[str]) -> tuple[list[str], list[IgnoredTensors]]:
    """Splits what no logical tensor uses into unexpected names and, by pattern, what is left out on purpose."""
    unexpected = []
    by_pattern: dict[str, list[SourceTensor]] = {}
    for tensor in left:
        pattern = next((pattern for pattern in patterns if re.search(pattern, tensor.name)), None)
        if pattern is None:
            unexpected.append(f"{tensor.name} {list(tensor.shape)}")
        else:
            by_pattern.setdefault(pattern, []).append(tensor)
    return unexpected, [
        IgnoredTensors(pattern, len(found), sum(tensor.stored_bytes for tensor in found)) for pattern, found in by_pattern.items()
    ]
