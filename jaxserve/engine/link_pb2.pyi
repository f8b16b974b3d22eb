from collections.abc import Iterable as _Iterable
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("info_json",)
    INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    info_json: str
    def __init__(self, info_json: str | None = ...) -> None: ...

class ToEngine(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, commands: _Iterable[Command | _Mapping] | None = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("abort", "add")
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    add: Add
    abort: Abort
    def __init__(self, add: Add | _Mapping | None = ..., abort: Abort | _Mapping | None = ...) -> None: ...

class Add(_message.Message):
    __slots__ = ("cache_salt", "params", "priority", "prompt_token_ids", "request_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    def __init__(
        self,
        request_id: str | None = ...,
        prompt_token_ids: _Iterable[int] | None = ...,
        params: SamplingParams | _Mapping | None = ...,
        priority: int | None = ...,
        cache_salt: str | None = ...,
    ) -> None: ...

class Abort(_message.Message):
    __slots__ = ("index", "request_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    def __init__(self, request_id: str | None = ..., index: int | None = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = (
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_penalty",
        "seed",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    )
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: int | None = ..., value: float | None = ...) -> None: ...

    N_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    max_tokens: int
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(
        self,
        n: int | None = ...,
        temperature: float | None = ...,
        top_p: float | None = ...,
        top_k: int | None = ...,
        min_p: float | None = ...,
        presence_penalty: float | None = ...,
        frequency_penalty: float | None = ...,
        repetition_penalty: float | None = ...,
        seed: int | None = ...,
        stop_token_ids: _Iterable[int] | None = ...,
        ignore_eos: bool | None = ...,
        max_tokens: int | None = ...,
        min_tokens: int | None = ...,
        logprobs: int | None = ...,
        prompt_logprobs: int | None = ...,
        logit_bias: _Mapping[int, float] | None = ...,
    ) -> None: ...

class FromEngine(_message.Message):
    __slots__ = ("events", "failure", "rejections")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    rejections: _containers.RepeatedCompositeFieldContainer[Rejection]
    failure: str
    def __init__(
        self,
        events: _Iterable[Event | _Mapping] | None = ...,
        rejections: _Iterable[Rejection | _Mapping] | None = ...,
        failure: str | None = ...,
    ) -> None: ...

class Event(_message.Message):
    __slots__ = (
        "error",
        "finish_reason",
        "has_logprobs",
        "has_prompt_logprobs",
        "index",
        "logprobs",
        "num_cached_tokens",
        "num_prompt_tokens",
        "prompt_logprobs",
        "request_id",
        "stop_reason",
        "token_ids",
    )
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HAS_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    has_logprobs: bool
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    has_prompt_logprobs: bool
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    finish_reason: str
    stop_reason: int
    error: str
    def __init__(
        self,
        request_id: str | None = ...,
        index: int | None = ...,
        token_ids: _Iterable[int] | None = ...,
        num_prompt_tokens: int | None = ...,
        num_cached_tokens: int | None = ...,
        has_logprobs: bool | None = ...,
        logprobs: _Iterable[Logprobs | _Mapping] | None = ...,
        has_prompt_logprobs: bool | None = ...,
        prompt_logprobs: _Iterable[Logprobs | _Mapping] | None = ...,
        finish_reason: str | None = ...,
        stop_reason: int | None = ...,
        error: str | None = ...,
    ) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprob", "rank", "token_id", "top_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(
        self,
        token_id: int | None = ...,
        logprob: float | None = ...,
        rank: int | None = ...,
        top_ids: _Iterable[int] | None = ...,
        top_logprobs: _Iterable[float] | None = ...,
    ) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("kind", "message", "param", "request_id")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INVALID_REQUEST: _ClassVar[Rejection.Kind]
        OVERLOADED: _ClassVar[Rejection.Kind]
        UNAVAILABLE: _ClassVar[Rejection.Kind]
        INTERNAL: _ClassVar[Rejection.Kind]

    INVALID_REQUEST: Rejection.Kind
    OVERLOADED: Rejection.Kind
    UNAVAILABLE: Rejection.Kind
    INTERNAL: Rejection.Kind
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kind: Rejection.Kind
    message: str
    param: str
    def __init__(
        self,
        request_id: str | None = ...,
        kind: Rejection.Kind | str | None = ...,
        message: str | None = ...,
        param: str | None = ...,
    ) -> None: ...
