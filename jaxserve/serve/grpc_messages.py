"""`vllm.grpc.engine` messages from and to our own types. The protocol's rules are said here; `grpc_engine` moves the messages.

A field that the protocol marks optional (temperature, max_tokens, seed, logprobs) and that is absent takes the model's default. The
plain ones have no absence: their zero takes vLLM's (top_p 0 is 1, repetition_penalty 0 is 1, n 0 is 1), and booleans mean what they say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxserve import __version__
from jaxserve.core.events import Logprobs
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import InvalidRequest
from jaxserve.serve.delta import Delta
from jaxserve.serve.openai_answers import finish_reason


def check_rank(name: str, rank: int, num_engines: int) -> None:
    """Raises InvalidRequest when the field `name` is not the number of an engine."""
    if not 0 <= rank < num_engines:
        ranks = "one engine, rank 0" if num_engines == 1 else f"{num_engines} engines, ranks 0 to {num_engines - 1}"
        raise InvalidRequest(f"{name} is {rank}; this server has {ranks}.", param=name)


def check_served(request: pb.GenerateRequest, num_engines: int) -> None:
    """Raises InvalidRequest, naming it, for a part of the request that this server does not serve."""
    for name in ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json"):
        if request.HasField(name):
            raise InvalidRequest(f"{name} is not supported by this engine; leave it out.", param=name)
    if request.extra_mm_inputs:
        raise InvalidRequest("extra_mm_inputs is not supported by this engine; leave it out.", param="extra_mm_inputs")
    if request.HasField("data_parallel_rank"):
        check_rank("data_parallel_rank", request.data_parallel_rank, num_engines)
    constraint = request.sampling_params.WhichOneof("constraint")
    if constraint is not None:
        raise InvalidRequest(f"{constraint} is not supported by this engine; leave it out.", param=constraint)


def check_profile_served(request: common_pb2.StartProfileRequest) -> None:
    """Raises InvalidRequest, naming it, for an option that jax.profiler does not have."""
    for descriptor, value in request.ListFields():
        if descriptor.name != "output_dir" and value:
            raise InvalidRequest(f"{descriptor.name} is not supported by this engine's profiler; leave it out.", param=descriptor.name)


def sampling_params(message: pb.SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """The parameters; raises InvalidRequest for one out of range. Text is only produced where stop strings need it.

    Args:
        message: What the client sent.
        defaults: The model's own, for what it may leave out.
    """

    def optional(name: str, default: float | None = None) -> Any:
        return getattr(message, name) if message.HasField(name) else defaults.get(name, default)

    return SamplingParams(
        n=message.n or 1,
        temperature=optional("temperature", 1.0),
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        seed=optional("seed"),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        max_tokens=optional("max_tokens"),
        min_tokens=message.min_tokens,
        logprobs=optional("logprobs"),
        prompt_logprobs=optional("prompt_logprobs"),
        logit_bias=dict(message.logit_bias),
        detokenize=bool(message.stop),
        skip_special_tokens=message.skip_special_tokens,
        spaces_between_special_tokens=message.spaces_between_special_tokens,
        include_stop_str_in_output=message.include_stop_str_in_output,
    )


class Loads:
    """How busy one engine is, as GetLoads tells it; keeps what the rate of tokens needs from one call to the next."""

    MIN_INTERVAL_S = 0.5

    def __init__(self) -> None:
        self._time_s: float | None = None
        self._num_tokens = 0
        self._tokens_per_s = 0.0

    def load(self, rank: int, stats: EngineStats, info: EngineInfo, now_s: float) -> pb.SchedulerLoad:
        """The figures; `now_s` is `time.monotonic()`. The rate is that since a call before, at least MIN_INTERVAL_S ago."""
        if self._time_s is None or now_s - self._time_s >= self.MIN_INTERVAL_S:
            if self._time_s is not None:
                # Fewer than before: the engine was started again.
                num_tokens = stats.num_generated_tokens - self._num_tokens
                self._tokens_per_s = max(num_tokens, 0) / (now_s - self._time_s)
            self._time_s, self._num_tokens = now_s, stats.num_generated_tokens
        num_pages = max(stats.num_pages - 1, 1)  # the null page holds nothing
        return pb.SchedulerLoad(
            dp_rank=rank,
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=stats.num_used_pages * info.page_size,
            max_total_num_tokens=num_pages * info.page_size,
            token_usage=stats.num_used_pages / num_pages,
            gen_throughput=self._tokens_per_s,
            cache_hit_rate=stats.num_cache_hits / max(stats.num_cache_queries, 1),
            utilization=stats.num_running / info.max_num_seqs,
            max_running_requests=info.max_num_seqs,
        )


def loads_response(loads: Sequence[pb.SchedulerLoad]) -> pb.GetLoadsResponse:
    """The answer of GetLoads."""
    return pb.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=len(loads), loads=loads)


@dataclass(slots=True)
class Answer:
    """Makes the responses of one Generate call.

    Streaming: a chunk for every delta that has tokens, the last one too, so that each token is in exactly one chunk; then, when a
    sequence ends, one `complete` that repeats its last delta. Not streaming: only a `complete` for each sequence, with everything.
    """

    is_stream: bool
    prompt: Sequence[int]
    num_top: int
    num_prompt_top: int
    _deltas: dict[int, list[Delta]] = field(default_factory=dict)

    def responses(self, delta: Delta) -> list[pb.GenerateResponse]:
        """What to send for a delta."""
        if not self.is_stream:
            deltas = self._deltas.setdefault(delta.index, [])
            deltas.append(delta)
            return [self._complete(self._deltas.pop(delta.index), has_input=True)] if delta.finish_reason else []
        responses = []
        if delta.token_ids or delta.prompt_logprobs is not None:
            responses.append(self._chunk(delta))
        if delta.finish_reason is not None:
            responses.append(self._complete([delta], has_input=False))
        return responses

    def _chunk(self, delta: Delta) -> pb.GenerateResponse:
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=delta.num_prompt_tokens,
            completion_tokens=len(delta.token_ids),
            cached_tokens=delta.num_cached_tokens,
            index=delta.index,
        )
        if delta.logprobs is not None:
            chunk.output_logprobs.CopyFrom(_output_logprobs(delta.logprobs, self.num_top))
        if delta.prompt_logprobs is not None:
            chunk.input_logprobs.CopyFrom(_input_logprobs(delta.prompt_logprobs, self.prompt, self.num_prompt_top))
        return pb.GenerateResponse(chunk=chunk)

    def _complete(self, deltas: list[Delta], *, has_input: bool) -> pb.GenerateResponse:
        last = deltas[-1]
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        complete = pb.GenerateComplete(
            output_ids=token_ids,
            finish_reason=finish_reason(last) or "stop",
            prompt_tokens=last.num_prompt_tokens,
            completion_tokens=len(token_ids),
            cached_tokens=last.num_cached_tokens,
            index=last.index,
        )
        if last.logprobs is not None:
            entries = [entry for delta in deltas for entry in delta.logprobs or ()]
            complete.output_logprobs.CopyFrom(_output_logprobs(entries, self.num_top))
        if has_input and deltas[0].prompt_logprobs is not None:
            complete.input_logprobs.CopyFrom(_input_logprobs(deltas[0].prompt_logprobs, self.prompt, self.num_prompt_top))
        if isinstance(last.stop_reason, int):
            complete.matched_token_id = last.stop_reason
        elif last.stop_reason is not None:
            complete.matched_stop_str = last.stop_reason
        return pb.GenerateResponse(complete=complete)


def _output_logprobs(entries: Sequence[Logprobs], num_top: int) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry, num_top) for entry in entries],
    )


def _input_logprobs(entries: Sequence[Logprobs | None], prompt: Sequence[int], num_top: int) -> pb.InputLogProbs:
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=None if entry is None else entry.logprob) for entry in entries],
        token_ids=prompt,
        top_logprobs=[pb.TopLogProbs() if entry is None else _top(entry, num_top) for entry in entries],
    )


def _top(entry: Logprobs, num_top: int) -> pb.TopLogProbs:
    count = len(entry.top_ids) if num_top == -1 else num_top
    return pb.TopLogProbs(values=entry.top_logprobs[:count], token_ids=entry.top_ids[:count])
