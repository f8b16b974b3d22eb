"""`HostMemory`: arrays of their own that a CPU device takes over without a copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.host_memory import ALIGNMENT, CHUNK_BYTES, HostMemory


def test_arrays_do_not_overlap_and_outlive_their_allocator() -> None:
    memory = HostMemory()
    shapes = [(3, 5), (7,), (), (0, 4), (CHUNK_BYTES // 2 + 1,), (CHUNK_BYTES // 2,), (CHUNK_BYTES // 4 + 3,)]
    arrays = [memory.empty(shape, dtype) for shape, dtype in zip(shapes, [jnp.bfloat16] * 4 + [np.uint8] * 2 + [np.float32], strict=True)]
    for i, array in enumerate(arrays):
        array[...] = i
    del memory
    for i, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
        assert array.shape == shape and array.ctypes.data % ALIGNMENT == 0
        assert (array == i).all()


def test_a_cpu_device_takes_them_as_they_lie() -> None:
    memory = HostMemory()
    memory.empty((3,), np.uint8)
    array = memory.empty((100, 70), np.float32)
    array[...] = 2.0
    taken = jax.device_put(array, jax.devices("cpu")[0])
    assert taken.unsafe_buffer_pointer() == array.ctypes.data
    pointer = array.ctypes.data
    del memory, array
    assert taken.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(taken, 2.0)
