"""Every way a sequence ends by itself. After [5] the counting device says 6, 13, 27, 55, 111, ... (each is twice the last plus 1)."""

from __future__ import annotations

import pytest

from jaxserve.core.sequence import FinishReason
from jaxserve.scheduler.stopping import masked_stop_ids

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("params", "tokens", "finish_reason", "stop_reason"),
    [
        ({"max_tokens": 3}, [6, 13, 27], LENGTH, None),
        ({"max_tokens": 9}, [6, 13, 27, 55], STOP, None),  # 55 is EOS
        ({"max_tokens": 9, "ignore_eos": True}, [6, 13, 27, 55, 111, 223, 447, 895, 791], LENGTH, None),
        ({"max_tokens": 9, "stop_token_ids": [13]}, [6, 13], STOP, 13),
        ({"max_tokens": 9, "stop_token_ids": [55]}, [6, 13, 27, 55], STOP, None),  # EOS comes before stop ids
        ({"max_tokens": 9, "stop_token_ids": [55], "ignore_eos": True}, [6, 13, 27, 55], STOP, 55),
        ({"max_tokens": 4}, [6, 13, 27, 55], STOP, None),  # and stop before length
        # 13 and 55 may not come before two tokens are out: the device takes 14 instead, then 6 + 14 + 5 + 3 = 28.
        ({"max_tokens": 9, "stop_token_ids": [13], "min_tokens": 2}, [6, 14, 28, 57, 115, 231, 463, 927, 855], LENGTH, None),
        ({"max_tokens": 9, "stop_token_ids": [13], "min_tokens": 1}, [6, 13], STOP, 13),
    ],
)
def test_the_order_of_stops(make_loop, params, tokens, finish_reason, stop_reason) -> None:
    loop = make_loop(eos_token_ids=frozenset({55, 999}))
    loop.add("a", [5], **params)
    loop.run()
    output = loop.outputs["a", 0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (tokens, finish_reason, stop_reason)


def test_the_context_ends_whatever_was_asked(make_loop) -> None:
    loop = make_loop(max_model_len=8)
    loop.add("a", [5] * 5, max_tokens=None)
    loop.add("b", [5] * 5, max_tokens=100, min_tokens=50)
    loop.run()
    for name in "ab":
        assert (len(loop.outputs[name, 0].token_ids), loop.outputs[name, 0].finish_reason) == (3, LENGTH)


def test_a_stop_before_min_tokens_that_the_device_lets_through_is_not_taken(make_loop) -> None:
    """The host does not rely on the mask."""
    loop = make_loop(eos_token_ids=frozenset({13}))
    loop.add("a", [5], max_tokens=9, min_tokens=3)
    loop.runner._sample = lambda slot: loop.runner._best(slot)
    loop.run()
    assert loop.outputs["a", 0].token_ids[:3] == [6, 13, 27] and loop.outputs["a", 0].finish_reason is LENGTH


def test_masked_ids_are_all_that_stop(make_loop) -> None:
    loop = make_loop()
    request = loop.add("a", [1], min_tokens=1, stop_token_ids=[4, 2])
    assert masked_stop_ids(request.params, frozenset({9, 8})) == (2, 4, 8, 9)


def test_logits_that_are_not_finite_end_only_their_sequence(make_loop) -> None:
    loop = make_loop(runner={"poison_token_id": 777})
    loop.add("bad", [777, *[1] * 29], max_tokens=3)  # more than a step computes: its first pages are known before the end
    loop.add("good", [5], max_tokens=3)
    loop.run()
    bad = loop.outputs["bad", 0]
    assert (bad.token_ids, bad.finish_reason, bad.error) == ([], FinishReason.ERROR, "logits were not finite")
    assert loop.outputs["good", 0].token_ids == [6, 13, 27]
    loop.scheduler.check_integrity()
    assert len(loop.scheduler.roster.pages.cache) == 0, "its pages are not offered to others"


def test_logprobs_come_with_their_token(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [5], max_tokens=2, logprobs=2)
    loop.add("b", [5], max_tokens=2)
    loop.run()
    first, second = loop.outputs["a", 0].logprobs
    assert first == (6, -1.0, 1, [6, 7], [-1.0, -2.0])
    assert second == (13, -1.0, 1, [13, 14], [-1.0, -2.0])
    assert loop.outputs["b", 0].logprobs == []
