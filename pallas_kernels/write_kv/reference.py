"""The oracle of `write_kv`: a NumPy loop over tokens."""

from __future__ import annotations

import numpy as np


def write_kv_reference(pages: np.ndarray, k: np.ndarray, v: np.ndarray, write_page: np.ndarray, write_offset: np.ndarray) -> np.ndarray:
    """Same arguments and result as `api.write_kv`, on NumPy arrays; returns a new array."""
    written = pages.copy()
    for token, (page, offset) in enumerate(zip(write_page, write_offset, strict=True)):
        written[page, 0, :, offset] = k[token].astype(pages.dtype)
        written[page, 1, :, offset] = v[token].astype(pages.dtype)
    return written
