"""A fake device that keeps what a real one keeps, slots and pages, and checks every access. Next: `core.plan` for what it obeys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.config import GroupLimits
from jaxserve.core.events import Logprobs, StepResult
from jaxserve.core.plan import Admission, Plan, Row
from jaxserve.testing.counting import hidden_state, logprobs_around
from jaxserve.testing.serial_device import PretendedStep, SerialDevice

type _Content = list[tuple[int, int] | None]


@dataclass(slots=True)
class _Slot:
    """Device state of one sequence; `tokens` are those computed so far, `verified` the page versions they were last compared with."""

    admission: Admission
    tables: list[list[int]]
    verified: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    total: int = 0
    last_token: int | None = None


class CountingRunner:
    """A Runner without a model. Each computed token is written, with its position, into the page that the slot's table names.

    Before a row is computed, all positions before it that it sees, in each group, are read back through the table and must hold the
    sequence's own tokens. A token's value still depends on all tokens before it.

    Args:
        groups: What each KV group sees.
        vocab_size: Tokens are 0 .. vocab_size - 1.
        poison_token_id: Sampling after a sequence that holds this token gives -1 (logits not finite).
        tokens_of: Gives a sequence's tokens by seq_id; with it, prefix hits are compared with what they should hold, not only
            with what the slot was seen to write. Needed for prefix hits where no group sees everything.
        step_s: Pretended duration of a step in seconds. `run` returns at once, and a step starts when the one before has ended.
        failures: Errors by the number of the step (the first is 1) whose `wait` raises them. What is dispatched afterwards fails
            too, until `reset`: on a device it would read what the failed step left.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        groups: Sequence[GroupLimits] = (GroupLimits(),),
        vocab_size: int = 1000,
        poison_token_id: int | None = None,
        tokens_of: Callable[[int], Sequence[int]] | None = None,
        step_s: float = 0.0,
        failures: Mapping[int, Exception] | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.groups = tuple(groups)
        self.vocab_size = vocab_size
        self._poison_token_id = poison_token_id
        self._tokens_of = tokens_of
        self._device = SerialDevice(step_s)
        self.failures = dict(failures or {})
        self.num_steps = 0
        self.num_late_compiles = 0
        self.reset()

    def reset(self) -> None:
        """Lose all pages and slots, as after a failed step."""
        self._contents: list[_Content] = [[] for _ in range(self.num_pages)]
        self._versions = [0] * self.num_pages
        self._slots: dict[int, _Slot] = {}
        self._failure: Exception | None = None

    def close(self) -> None:
        """Nothing to free: there is no device."""

    def run(self, plan: Plan) -> PretendedStep:
        """Execute the plan: admissions, page writes, then the rows in order."""
        self.num_steps += 1
        self._failure = self._failure or self.failures.get(self.num_steps)
        if self._failure is not None:
            return PretendedStep(self._failure, frozenset(), frozenset(), self._device.dispatch())
        self._admit(plan)
        sizes = [row.num_tokens for row in plan.rows]
        num_single = sizes.count(1)
        assert sizes[:num_single] == [1] * num_single, "rows with one token come first"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot has two rows"
        writers: dict[int, int] = {}
        read: set[int] = set()
        result = StepResult(token_ids=[], logprobs=[], prompt_logprobs=[], pooled=np.zeros((len(plan.rows), len(hidden_state([])))))
        for row in plan.rows:
            self._compute(row, read, writers, result)
        return PretendedStep(result, read, writers.keys(), self._device.dispatch())

    def poison(self, pages: Iterable[int]) -> None:
        """Spoil what the pages hold: nobody may read them any more."""
        for page in pages:
            self._contents[page] = []
            self._versions[page] += 1

    def _admit(self, plan: Plan) -> None:
        for admission in plan.admissions:
            assert 0 <= admission.slot < self.max_num_seqs, f"slot {admission.slot} is not a sequence's"
            empty: list[list[int]] = [[] for _ in self.groups]
            self._slots[admission.slot] = _Slot(admission, empty, [[] for _ in self.groups])
        for slot, group, index, page in plan.page_writes:
            assert 0 < page < self.num_pages, f"page {page} is not a sequence's"
            table, verified = self._slots[slot].tables[group], self._slots[slot].verified[group]
            # Entries that no token will see are not written; on a device they hold anything.
            first = self.groups[group].first_visible(self._slots[slot].admission.num_computed_tokens) // self.page_size
            assert index == len(table) or index == first > len(table), "page tables only grow"
            table += [-1] * (index - len(table)) + [page]
            verified += [-1] * (len(table) - len(verified))
        for admission in plan.admissions:
            self._read_prefix(self._slots[admission.slot])

    def _read_prefix(self, slot: _Slot) -> None:
        """Positions found in the prefix cache: their tokens come from the pages of a group that sees them all."""
        admission = slot.admission
        length = admission.num_computed_tokens
        whole = next((table for table, group in zip(slot.tables, self.groups, strict=True) if group.reach is None), None)
        if length and whole is None:
            assert self._tokens_of is not None, "no group holds the whole prefix"
            slot.tokens = list(self._tokens_of(admission.seq_id)[:length])
        for i in range(length if whole is not None else 0):
            assert whole is not None
            entry = self._contents[whole[i // self.page_size]][i % self.page_size]
            assert entry is not None and entry[1] == i, f"position {i} is read from a page that holds {entry}"
            slot.tokens.append(entry[0])
        slot.total = sum(slot.tokens)
        if self._tokens_of is not None:
            assert slot.tokens == list(self._tokens_of(admission.seq_id)[:length]), "a prefix hit holds other tokens"
        if admission.penalty_slot is not None:
            assert list(admission.token_ids[:length]) == slot.tokens and len(admission.token_ids) > length

    def _compute(self, row: Row, read: set[int], writers: dict[int, int], result: StepResult) -> None:
        slot = self._slots[row.slot]
        assert slot.admission.seq_id == row.seq_id, f"slot {row.slot} belongs to sequence {slot.admission.seq_id}, not {row.seq_id}"
        assert row.start == len(slot.tokens), f"row starts at {row.start}, the slot's length is {len(slot.tokens)}"
        self._verify(slot, read)
        tokens = row.token_ids
        assert all(0 <= token < self.vocab_size for token in tokens)
        if not tokens:
            assert slot.last_token is not None, "the slot has no sampled token"
            tokens = (slot.last_token,)  # -1 when the step after a non-finite one was dispatched already
        assert len(tokens) == row.num_tokens
        self._write(slot, row.slot, tokens, writers)
        if row.num_prompt_logprobs is None:
            prompt_logprobs = None
            slot.tokens += tokens
            slot.total += sum(tokens)
        else:
            prompt_logprobs = self._judge_prompt(slot, row, row.num_prompt_logprobs)
        token_id = self._sample(slot) if row.is_sampled else None
        slot.last_token = token_id
        wants_logprobs = token_id is not None and row.num_logprobs is not None
        result.token_ids.append(token_id)
        result.logprobs.append(logprobs_around(self._best(slot), token_id, self.vocab_size, row.num_logprobs) if wants_logprobs else None)  # type: ignore[arg-type]
        result.prompt_logprobs.append(prompt_logprobs)
        if row.num_pooled_tokens:
            assert result.pooled is not None
            result.pooled[len(result.token_ids) - 1] = self._pooled(slot, row.num_pooled_tokens)

    def _pooled(self, slot: _Slot, num_tokens: int) -> np.ndarray:
        """The sum of the hidden states of the last tokens."""
        if self._poison_token_id is not None and self._poison_token_id in slot.tokens:
            return np.full(len(hidden_state([])), np.nan)
        ends = range(len(slot.tokens) - num_tokens + 1, len(slot.tokens) + 1)
        return np.array([hidden_state(slot.tokens[:end]) for end in ends]).sum(0)

    def _judge_prompt(self, slot: _Slot, row: Row, num_top: int) -> list[Logprobs]:
        """Compute the row's tokens one by one; an entry for each target in the prompt."""
        entries = []
        for token, target in zip(row.token_ids, row.prompt_targets, strict=True):
            slot.tokens.append(token)
            slot.total += token
            if target >= 0:
                entries.append(logprobs_around(self._best(slot), target, self.vocab_size, num_top))
        return entries

    def _verify(self, slot: _Slot, read: set[int]) -> None:
        """Every visible position holds the sequence's own token. Pages not written since the last comparison are not read again."""
        length, size = len(slot.tokens), self.page_size
        end = -(-length // size)
        for table, verified, group in zip(slot.tables, slot.verified, self.groups, strict=True):
            assert len(table) >= end, "a visible position has no page"
            first = group.first_visible(length) // size
            visible = table[first:end]
            assert -1 not in visible, "a visible position has no page"
            read.update(visible)
            versions = [self._versions[page] for page in visible]
            if versions == verified[first:end]:
                continue
            for i, page in enumerate(visible, first):
                span = range(i * size, min((i + 1) * size, length))
                held, own = self._contents[page][: len(span)], [(slot.tokens[p], p) for p in span]
                assert held == own, f"page {page} of sequence {slot.admission.seq_id} holds {held}, not {own}"
            verified[first:end] = versions

    def _write(self, slot: _Slot, slot_id: int, tokens: Sequence[int], writers: dict[int, int]) -> None:
        size, start = self.page_size, len(slot.tokens)
        end = start + len(tokens)
        for group, table in enumerate(slot.tables):
            assert -(-end // size) <= len(table), f"position {end - 1} has no page"
            for i in range(start // size, -(-end // size)):
                page, first, last = table[i], max(start, i * size), min(end, (i + 1) * size)
                assert writers.setdefault(page, slot_id) == slot_id, f"page {page} has two writers in one step"
                content = self._contents[page]
                if not content:
                    content += [None] * size
                content[first - i * size : last - i * size] = zip(tokens[first - start : last - start], range(first, last), strict=True)
                self._versions[page] += 1
                slot.verified[group][i] = self._versions[page]

    def _best(self, slot: _Slot) -> int:
        return (slot.total + len(slot.tokens)) % self.vocab_size

    def _sample(self, slot: _Slot) -> int:
        """`next_token`; before `min_tokens` the next id that does not stop the sequence."""
        if self._poison_token_id is not None and self._poison_token_id in slot.tokens:
            return -1
        admission = slot.admission
        token = (self._best(slot) + (0 if admission.params.is_greedy else admission.seed)) % self.vocab_size
        if len(slot.tokens) - admission.num_prompt_tokens < admission.params.min_tokens:
            while token in admission.stop_token_ids:
                token = (token + 1) % self.vocab_size
        return token
