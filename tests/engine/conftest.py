"""A stand-in for the engine that needs no scheduler: each step gives every sequence one token, counting up from its prompt's sum."""

import threading
import time

import pytest

from jaxserve.core.events import TokenEvent
from jaxserve.core.request import Request
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import InvalidRequest

INFO = EngineInfo(
    model_path="/model", model="counting", model_type="llama", dtype="float32", max_model_len=256, vocab_size=320, eos_token_ids=(1,),
    num_pages=64, page_size=16, max_num_seqs=8, max_num_batched_tokens=64,
)  # fmt: skip


class CountingEngine:
    info = INFO

    def __init__(self) -> None:
        self.open: dict[tuple[str, int], tuple[Request, int]] = {}
        self.num_steps = 0
        self.step_error: Exception | None = None
        self.gate = threading.Event()  # a step ends only while it is open
        self.gate.set()

    def add(self, request: Request) -> None:
        if len(request.prompt_token_ids) > 100:
            raise InvalidRequest("the prompt can never fit", param="prompt")
        for index in range(request.params.n):
            self.open[request.request_id, index] = (request, 0)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        keys = [key for key in self.open if key[0] == request_id and index in (None, key[1])]
        return [self._event(key, *self.open.pop(key), [], FinishReason.ABORT) for key in keys]

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def stats(self) -> EngineStats:
        num_running = min(len(self.open), INFO.max_num_seqs)
        return EngineStats(
            has_work=self.has_work, num_running=num_running, num_waiting=len(self.open) - num_running, num_steps=self.num_steps
        )

    def reset_prefix_cache(self) -> bool:
        return not self.open

    def step(self) -> list[TokenEvent]:
        self.num_steps += 1
        time.sleep(0.001)
        assert self.gate.wait(30)
        if self.step_error is not None:
            raise self.step_error
        return [self._advance(key) for key in list(self.open)]

    def _advance(self, key: tuple[str, int]) -> TokenEvent:
        request, num_done = self.open[key]
        token_id = sum(request.prompt_token_ids) + key[1] + num_done
        self.open[key] = (request, num_done + 1)
        if request.params.max_tokens is None or num_done + 1 < request.params.max_tokens:
            return self._event(key, request, num_done, [token_id], None)
        del self.open[key]
        return self._event(key, request, num_done, [token_id], FinishReason.LENGTH)

    @staticmethod
    def _event(key, request, num_done, token_ids, finish_reason) -> TokenEvent:
        return TokenEvent(
            request_id=key[0], index=key[1], token_ids=token_ids, num_prompt_tokens=len(request.prompt_token_ids), num_cached_tokens=0,
            finish_reason=finish_reason,
        )  # fmt: skip


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture(scope="session")
def engine_info() -> EngineInfo:
    return INFO
