"""What a client may ask of the sampler, checked once.

Knows no tokenizer and no model: limits that depend on the model (vocabulary, context length, `max_logprobs`) are checked where
the request meets the engine (`jaxserve.engine.admission`). Names, defaults and ranges are vLLM's. Next: `core.request`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.errors import InvalidRequest

MAX_N = 128
MAX_STOP_STRINGS = 4
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MIN_TEMPERATURE = 0.01
"""A temperature between 0 and this is raised to it: the logits would overflow."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
"""Beyond these the logits would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens and when to stop. Raises `InvalidRequest`, naming the field, on a value out of range.

    Attributes:
        n: Number of sequences sampled from one prompt, 1..128; must be 1 when greedy.
        temperature: 0 (greedy) .. 2; values below 0.01 but above 0 are raised to 0.01.
        top_p: Keep the smallest set of tokens whose mass reaches it, in (0, 1].
        top_k: Keep the k most likely tokens; 0 or -1 is off.
        min_p: Keep tokens at least this share of the best one's probability, in [0, 1].
        presence_penalty, frequency_penalty: In [-2, 2], over output tokens only.
        repetition_penalty: In [1e-6, 1e6], over prompt and output tokens; positive logits are divided by it, others multiplied.
        seed: None or -1 is fresh entropy; child i of n uses seed + i.
        stop: Strings that end the text; nothing of a match is returned unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the sequence, besides the model's own EOS set.
        ignore_eos: Do not stop at the model's EOS ids (user `stop_token_ids` still stop).
        max_tokens: At most this many output tokens; None is the rest of the context.
        min_tokens: EOS, stop ids and stop strings are held off before this many output tokens.
        logprobs: Log-probabilities of this many most likely tokens and of the sampled one; -1 is the whole vocabulary.
        prompt_logprobs: The same for each prompt token but the first.
        logit_bias: Token id to a value added to its logit, clamped to [-100, 100].
        detokenize: Produce text; needed for `stop`.
        skip_special_tokens, spaces_between_special_tokens, include_stop_str_in_output: Shape of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._normalize()
        self._check_ranges()
        self._check_stopping()
        self._check_logprobs()
        if self.is_greedy:
            if self.n > 1:
                raise InvalidRequest(
                    f"n is {self.n} with temperature 0: every greedy sequence is the same; use n=1 or a temperature above 0.", param="n"
                )
            self._set(top_p=1.0, top_k=0, min_p=0.0)

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def needs_penalty_slot(self) -> bool:
        """True when sampling needs per-vocabulary state on the device: penalties, logit_bias or min_tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.logit_bias or self.min_tokens)

    def with_changes(self, **changes: Any) -> SamplingParams:
        """A copy with some fields replaced, checked again."""
        return replace(self, **changes)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _normalize(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set(
            temperature=_number(self.temperature, "temperature"),
            top_p=_number(self.top_p, "top_p"),
            min_p=_number(self.min_p, "min_p"),
            presence_penalty=_number(self.presence_penalty, "presence_penalty"),
            frequency_penalty=_number(self.frequency_penalty, "frequency_penalty"),
            repetition_penalty=_number(self.repetition_penalty, "repetition_penalty"),
            stop=_sequence(stop, str, "stop"),
            stop_token_ids=tuple(dict.fromkeys(_sequence(self.stop_token_ids, int, "stop_token_ids"))),
            logit_bias=_logit_bias(self.logit_bias),
        )
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}; it must be true or false.", param=name)
        for name in ("n", "top_k", "min_tokens"):
            _integer(getattr(self, name), name)
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(getattr(self, name), name)
        if self.top_k == -1:
            self._set(top_k=0)
        if self.seed == -1:
            self._set(seed=None)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            self._set(temperature=MIN_TEMPERATURE)

    def _check_ranges(self) -> None:
        _within(self.n, "n", 1, MAX_N)
        _within(self.temperature, "temperature", 0.0, 2.0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p is {self.top_p}; it must be above 0 and at most 1.", param="top_p")
        _within(self.min_p, "min_p", 0.0, 1.0)
        _within(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        _within(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        _within(self.repetition_penalty, "repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _within(self.top_k, "top_k", 0, 2**31 - 1)
        if self.seed is not None:
            _within(self.seed, "seed", -(2**63), 2**63 - 1)

    def _check_stopping(self) -> None:
        if self.max_tokens is not None:
            _within(self.max_tokens, "max_tokens", 1, 2**31 - 1)
        _within(self.min_tokens, "min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}.", param="min_tokens")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.", param="stop")
        for text in self.stop:
            if not text:
                raise InvalidRequest("stop holds an empty string; remove it.", param="stop")
            if len(text) > MAX_STOP_STRING_CHARS:
                raise InvalidRequest(f"a stop string has {len(text)} characters; at most {MAX_STOP_STRING_CHARS}.", param="stop")
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True.", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed.", param="stop_token_ids"
            )

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < -1:
                raise InvalidRequest(f"{name} is {value}; it must be at least 0, or -1 for the whole vocabulary.", param=name)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} is {value!r}; it must be a number.", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} is {value!r}; it must be finite.", param=name)
    return number


def _integer(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} is {value!r}; it must be an integer.", param=name)


def _within(value: float, name: str, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}.", param=name)


def _sequence[T](values: Any, kind: type[T], name: str) -> tuple[T, ...]:
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise InvalidRequest(f"{name} is {values!r}; it must be a list of {kind.__name__} values.", param=name)
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidRequest(f"{name} holds {value!r}; every entry must be of type {kind.__name__}.", param=name)
    return tuple(values)


def _logit_bias(values: Any) -> dict[int, float]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise InvalidRequest(f"logit_bias is {values!r}; it must map token ids to numbers.", param="logit_bias")
    if len(values) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(values)} entries; at most {MAX_LOGIT_BIAS} are allowed.", param="logit_bias")
    bias: dict[int, float] = {}
    for key, value in values.items():
        # JSON has no integer keys: "17" is one too.
        if isinstance(key, bool) or not (isinstance(key, int) or (isinstance(key, str) and re.fullmatch(r"-?[0-9]{1,18}", key))):
            raise InvalidRequest(f"logit_bias key {key!r} is not a token id.", param="logit_bias")
        bias[int(key)] = min(100.0, max(-100.0, _number(value, "logit_bias")))
    return bias
