"""What a client asked, frozen, in the engine's terms: token ids and sampling parameters.

Knows no text and no sockets. The front end turns a body into one of these; the scheduler turns it into sequences
(`core.sequence`).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.sampling_params import SamplingParams

NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""`Request.params` of an embedding: nothing is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the engine sees it.

    Attributes:
        request_id: Unique inside the engine.
        label: The name that the client gave, if any; not unique. An abort by label ends every request that bears it.
        prompt_token_ids: Non-empty; every id below the model's vocabulary.
        params: Checked sampling parameters; `params.max_tokens` may still be None (rest of the context).
        pooling: The prompt is embedded, and nothing generated: the one sequence ends when its prompt is computed. None generates.
        arrival_time_s: `time.monotonic()` when the request reached the engine's side.
        priority: Lower runs earlier; only used by the priority policy.
        cache_salt: Isolates the request's prefix-cache pages from other salts.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = NO_SAMPLING
    pooling: PoolingParams | None = None
    arrival_time_s: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    label: str = ""
