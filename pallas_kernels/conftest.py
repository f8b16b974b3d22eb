"""Imports the package before pytest does: pytest would import an operation's folder a second time and put that module over the
function of the same name (`pallas_kernels.paged_attention`)."""

from collections.abc import Iterator

import jax
import pytest

import pallas_kernels  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def released_programs() -> Iterator[None]:
    """Compiled programs take memory maps, of which Linux gives a process 65,530: a module leaves none behind."""
    yield
    jax.clear_caches()
