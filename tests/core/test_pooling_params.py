"""Cut, then scaled; and which values are refused."""

import pytest

from jaxserve.core.pooling_params import PoolingParams
from jaxserve.errors import InvalidRequest


def test_a_vector_is_cut_and_then_scaled() -> None:
    pooled = [3.0, 4.0, 12.0]
    assert PoolingParams().finish(pooled) == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert PoolingParams(dimensions=2).finish(pooled) == pytest.approx([0.6, 0.8])
    assert PoolingParams(normalize=False).finish(pooled) == pooled
    assert PoolingParams(normalize=False, dimensions=1).finish(pooled) == [3.0]
    assert PoolingParams(dimensions=3).finish(pooled) == PoolingParams().finish(pooled)
    assert PoolingParams().finish([0.0, 0.0]) == [0.0, 0.0]
    assert PoolingParams().finish([3e300, 4e300]) == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "max"}, "pooling is 'max'; it must be one of last, mean."),
        ({"normalize": 1}, "normalize is 1; it must be true or false."),
        ({"dimensions": 0}, "dimensions is 0; it must be at least 1."),
        ({"dimensions": 1.5}, "dimensions is 1.5; it must be an integer."),
        ({"dimensions": True}, "dimensions is True; it must be an integer."),
    ],
)
def test_a_bad_value_is_named(fields: dict, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PoolingParams(**fields)
    assert (str(refused.value), refused.value.param) == (message, next(iter(fields)))
