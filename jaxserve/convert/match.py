"""Finds each logical tensor of a model in a source checkpoint, and accounts for every source tensor.

A missing, wrongly shaped or unexpected tensor is an error that names it: each would mean that the model is not the one its
config describes. Knows no file format; go on to `write_orbax.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

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
    missing: dict[str, None] = {}
    for spec in wanted:
        source = next((tensors[name] for name in spec.sources if name in tensors), None)
        if source is not None:
            pairs.append((spec, source))
        elif not spec.is_optional:
            # Once for all parts of a fused tensor, by the name that the source most likely lacks it under.
            missing[f"{spec.sources[0]} {list(_source_shape(spec))}"] = None
    wrong = [f"{tensor.name} is {list(tensor.shape)}, not {list(wanted)}" for tensor, wanted in _wrong_shapes(pairs)]
    used = {source.name for _, source in pairs}
    unexpected, ignored = _account([tensor for name, tensor in tensors.items() if name not in used], ignored_patterns)
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {listed(list(missing))}")
    if wrong:
        problems.append(f"{len(wrong)} of another shape than the config says: {listed(wrong)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {listed(unexpected)}")
    if problems:
        raise CheckpointError(f"The weights do not fit the config. Tensors {'; '.join(problems)}.")
    return [(spec, source if spec.cut is None else cut_out(spec, source)) for spec, source in pairs], ignored


def _wrong_shapes(pairs: Sequence[tuple[TensorSpec, SourceTensor]]) -> list[tuple[SourceTensor, tuple[int, ...]]]:
    """Source tensors of another shape than wanted, each once, with the shape wanted."""
    wanted = {source.name: (source, _source_shape(spec)) for spec, source in pairs}
    return [(source, shape) for source, shape in wanted.values() if source.shape != shape]


def _source_shape(spec: TensorSpec) -> tuple[int, ...]:
    return spec.shape if spec.cut is None else spec.cut.source_shape


def cut_out(spec: TensorSpec, source: SourceTensor) -> SourceTensor:
    """The logical tensor as a part of `source`, whose shape is the cut's. Only rows of the source that hold the part are read."""
    cut = spec.cut
    assert cut is not None and cut.source_shape[0] % cut.view[0] == 0, spec
    begin, end, _ = (cut.index[0], cut.index[0] + 1, 1) if isinstance(cut.index[0], int) else cut.index[0].indices(cut.view[0])
    rows_each, multiple = cut.source_shape[0] // cut.view[0], source.row_multiple
    first, last = begin * rows_each, end * rows_each
    start, stop = first - first % multiple, min(last + -last % multiple, source.shape[0])

    def read_whole(a: int, b: int) -> np.ndarray:
        rows = source.read_rows(start, stop)[first - start : last - start]
        part = rows.reshape(end - begin, *cut.view[1:])[0 if isinstance(cut.index[0], int) else slice(None), *cut.index[1:]]
        return (part.swapaxes(-1, -2) if cut.is_transposed else part).reshape(spec.shape)[a:b]

    # Adjacent rows as they are can be read piece by piece; a piece of anything else would read all of its rows again.
    is_aligned = (start, stop) == (first, last)
    is_plain = len(cut.index) == 1 and not cut.is_transposed and is_aligned and spec.shape[1:] == source.shape[1:]
    return replace(
        source,
        shape=spec.shape,
        stored_bytes=source.stored_bytes * math.prod(spec.shape) // max(source.size, 1),
        read_rows=(lambda a, b: source.read_rows(first + a, first + b)) if is_plain else read_whole,
        row_multiple=multiple if is_plain else spec.shape[0],
    )


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
