"""Packing: every section of the packed array holds what the plan says, and padding points at the null slot."""

import numpy as np
import pytest

from jaxserve.core.buckets import Bucket
from jaxserve.core.plan import Admission, PageWrite, Plan, Row
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.runner.layout import ADMISSION_FLOATS, ADMISSION_INTS, UPDATE_PAGE_WRITES, StepLayout
from jaxserve.runner.prepare import prepare, prepare_penalty_row

NULL_SLOT, NULL_PENALTY_SLOT = 8, 4
MIXED = StepLayout(Bucket(16, 8, 4, is_decode=False), num_groups=1, page_size=8)


def sections(layout, packed):
    return {n: packed[s.offset : s.end].reshape(s.shape) for n, s in layout.sections.items()}


def pack(plan, layout=MIXED):
    prepared = prepare(plan, layout, null_slot=NULL_SLOT, null_penalty_slot=NULL_PENALTY_SLOT)
    return prepared, sections(layout, prepared.packed)


def row(slot, start, tokens, num_tokens=None, **changes):
    values = {"seq_id": slot, "slot": slot, "start": start, "num_tokens": num_tokens or len(tokens), "token_ids": tuple(tokens)}
    return Row(**(values | {"is_sampled": True} | changes))


def test_sections_tile_the_packed_array():
    covered = np.zeros(MIXED.size, int)
    for section in MIXED.sections.values():
        covered[section.offset : section.end] += 1
        assert section.end - section.offset == np.prod(section.shape)
    assert (covered == 1).all()


def test_mixed_rows():
    rows = (row(2, 9, [], num_tokens=1), row(5, 0, [7, 8, 9], is_sampled=False), row(1, 4, [3, 4]))
    prepared, view = pack(Plan(step_id=1, rows=rows))
    assert view["row_slot"].tolist() == [2, 5, 1] + [NULL_SLOT] * 5
    assert view["row_tokens"].tolist() == [1, 3, 2, 0, 0, 0, 0, 0]
    assert view["tokens"].tolist() == [-1, 7, 8, 9, 3, 4] + [0] * 10
    assert view["logits_row"].tolist() == [0, 2, 8, 8]
    assert view["is_sampled"].tolist() == [1, 1, 0, 0]
    assert view["admissions"][:, 0].tolist() == [NULL_SLOT] * 8
    assert view["page_writes"][:, 0].tolist() == [NULL_SLOT] * MIXED.max_page_writes
    assert not prepared.wants_logprobs
    assert prepared.updates == []


def test_decode_rows_are_their_own_logits_rows():
    layout = StepLayout(Bucket(4, 4, 4, is_decode=True), num_groups=1, page_size=8)
    rows = (row(3, 9, [], num_tokens=1), row(0, 2, [11], is_sampled=False), row(6, 5, [], num_tokens=1, num_logprobs=2))
    prepared, view = pack(Plan(step_id=1, rows=rows), layout)
    assert view["tokens"].tolist() == [-1, 11, -1, 0]
    assert view["logits_row"].tolist() == [0, 1, 2, 4]
    assert view["is_sampled"].tolist() == [1, 0, 1, 0]
    assert view["wants_logprobs"].tolist() == [1]
    assert prepared.wants_logprobs


def test_prompt_targets():
    layout = StepLayout(Bucket(8, 4, 4, is_decode=False, has_prompt_logprobs=True), num_groups=1, page_size=8)
    rows = (row(0, 3, [], num_tokens=1), row(1, 0, [5, 6], num_prompt_logprobs=0, prompt_targets=(6, -1)))
    _, view = pack(Plan(step_id=1, rows=rows), layout)
    assert view["targets"].tolist() == [-1, 6, -1, -1, -1, -1, -1, -1]


def test_admission_fields_travel_bit_exact():
    params = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1, top_k=40, presence_penalty=-1.5, frequency_penalty=0.25,
                            repetition_penalty=1.1, min_tokens=3)  # fmt: skip
    admission = Admission(slot=6, seq_id=1, params=params, seed=-2, num_computed_tokens=16, num_prompt_tokens=20, rope_length=20,
                          penalty_slot=2)  # fmt: skip
    _, view = pack(Plan(step_id=1, rows=(row(6, 16, [1]),), admissions=(admission,)))
    packed = view["admissions"][0]
    ints = dict(zip(ADMISSION_INTS, packed[: len(ADMISSION_INTS)].view(np.uint32).tolist(), strict=True))
    floats = dict(zip(ADMISSION_FLOATS, packed[len(ADMISSION_INTS) :].view(np.float32), strict=True))
    assert ints == {"slot": 6, "length": 16, "top_k": 40, "seed_high": 2**32 - 1, "seed_low": 2**32 - 2, "min_length": 23,
                    "rope_length": 20, "penalty_slot": 2}  # fmt: skip
    assert all(floats[name] == np.float32(getattr(params, name)) for name in ADMISSION_FLOATS)


@pytest.mark.parametrize(
    "count", [0, 1, MIXED.max_page_writes, MIXED.max_page_writes + 1, MIXED.max_page_writes + 2 * UPDATE_PAGE_WRITES + 1]
)
def test_page_writes_beyond_the_steps_room_go_ahead_of_it(count):
    writes = tuple(PageWrite(1, 0, i, i + 1) for i in range(count))
    prepared, view = pack(Plan(step_id=1, rows=(row(1, 0, [1]),), page_writes=writes))
    arrays = [*prepared.updates, view["page_writes"]]
    real = np.concatenate([a[a[:, 0] != NULL_SLOT] for a in arrays])
    assert sorted(real[:, 2].tolist()) == list(range(count))
    assert (real[:, 3] == real[:, 2] + 1).all()


def test_penalty_row_counts_output_only():
    params = SamplingParams(logit_bias={3: -7.0}, presence_penalty=1.0)
    admission = Admission(slot=0, seq_id=1, params=params, seed=0, num_computed_tokens=0, num_prompt_tokens=3, rope_length=0,
                          penalty_slot=0, token_ids=(1, 2, 2, 5, 5, 4), stop_token_ids=(0, 6))  # fmt: skip
    row = prepare_penalty_row(admission, vocab_size=7)
    assert row.output_counts.tolist() == [0, 0, 0, 0, 1, 2, 0]
    assert np.flatnonzero(row.is_in_prompt).tolist() == [1, 2]
    assert row.logit_bias.tolist() == [0, 0, 0, -7, 0, 0, 0]
    assert np.flatnonzero(row.is_stop).tolist() == [0, 6]
