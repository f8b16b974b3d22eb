from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.text.sequence_text import SequenceText, TextDelta
from jaxserve.text.tokenizer import Tokenizer

EOS = 1


def events(
    ids: list[int], sizes: list[int], finish: FinishReason | None = FinishReason.LENGTH, stop_reason: int | None = None
) -> list[TokenEvent]:
    """Cuts ids into events of the given sizes (the rest goes into the last); logprobs carry the token's place."""
    cuts = [0]
    for size in sizes:
        cuts.append(min(len(ids), cuts[-1] + size))
    cuts.append(len(ids))
    out = []
    for i in range(len(cuts) - 1):
        places = range(cuts[i], cuts[i + 1])
        out.append(
            TokenEvent(
                request_id="r",
                index=0,
                token_ids=ids[cuts[i] : cuts[i + 1]],
                num_prompt_tokens=1,
                num_cached_tokens=0,
                logprobs=[Logprobs(ids[p], -float(p), 1, [], []) for p in places],
            )
        )
    out[-1].finish_reason, out[-1].stop_reason = finish, stop_reason
    return out


def collect(tokenizer: Tokenizer, params: SamplingParams, stream: list[TokenEvent]) -> tuple[TextDelta, list[str]]:
    """All deltas as one, and each delta's text."""
    text = SequenceText(tokenizer, params, [0])
    deltas = [text.push(event) for event in stream]
    ends = [delta for delta in deltas if delta.finish_reason is not None]
    assert len(ends) == 1
    for delta in deltas:
        assert [entry.token_id for entry in delta.logprobs or []] == delta.token_ids
    whole = TextDelta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finish_reason=ends[0].finish_reason,
        stop_reason=ends[0].stop_reason,
        is_stop_string_hit=ends[0].is_stop_string_hit,
    )
    return whole, [delta.text for delta in deltas]


TEXT = st.text(alphabet=st.sampled_from("ab é日🙂"), max_size=16)


@given(
    text=TEXT,
    stops=st.lists(st.text(alphabet=st.sampled_from("ab é日🙂"), min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(0, 5), max_size=10),
    min_tokens=st.integers(0, 6),
    is_included=st.booleans(),
    ends_with_eos=st.booleans(),
)
def test_result_does_not_depend_on_chunking(
    byte_level: Tokenizer, text: str, stops: list[str], sizes: list[int], min_tokens: int, is_included: bool, ends_with_eos: bool
) -> None:
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=is_included)
    ids = byte_level.encode(text, add_special_tokens=False) + [EOS] * ends_with_eos
    finish = FinishReason.STOP if ends_with_eos else FinishReason.LENGTH
    whole, texts = collect(byte_level, params, events(ids, sizes, finish))
    single, _ = collect(byte_level, params, events(ids, [1] * len(ids), finish))
    at_once, _ = collect(byte_level, params, events(ids, [], finish))
    assert whole == single == at_once
    assert all("\ufffd" not in piece for piece in texts)
    # Oracle: the first token after which a stop string ends past the text of the first min_tokens tokens.
    free = len(byte_level.decode(ids[:min_tokens]).rstrip("\ufffd"))
    hits = [
        (end, -len(stop), stop) for stop in stops for end in range(len(stop), len(text) + 1) if text[:end].endswith(stop) and end > free
    ]
    if not hits:
        assert (whole.text, whole.token_ids, whole.finish_reason, whole.is_stop_string_hit) == (text, ids, finish, False)
        return
    end, _, stop = min(hits)
    assert whole.text == text[: end if is_included else end - len(stop)]
    assert (whole.finish_reason, whole.stop_reason, whole.is_stop_string_hit) == (FinishReason.STOP, stop, True)
    assert whole.token_ids == byte_level.encode(text, add_special_tokens=False)[: len(whole.token_ids)]
    assert len(byte_level.decode(whole.token_ids).rstrip("\ufffd")) >= end > len(byte_level.decode(whole.token_ids[:-1]).rstrip("\ufffd"))


def test_stop_token_text_is_dropped(byte_level: Tokenizer) -> None:
    ids = [71, 72, EOS]
    options = {"skip_special_tokens": False, "stop_token_ids": (72,)}
    whole, _ = collect(byte_level, SamplingParams(**options), events(ids, [1], FinishReason.STOP))
    assert (whole.text, whole.token_ids, whole.stop_reason) == ("de", ids, None)
    whole, _ = collect(byte_level, SamplingParams(**options), events(ids[:2], [1], FinishReason.STOP, stop_reason=72))
    assert (whole.text, whole.token_ids, whole.stop_reason) == ("d", [71, 72], 72)
    whole, _ = collect(byte_level, SamplingParams(**options, include_stop_str_in_output=True), events(ids, [1], FinishReason.STOP))
    assert whole.text == "de</s>"
    whole, _ = collect(byte_level, SamplingParams(**options), events(ids, [1], FinishReason.LENGTH))
    assert whole.text == "de</s>", "only a token that stopped the sequence is dropped"


def test_min_tokens_region(byte_level: Tokenizer) -> None:
    ids = [71, 72, 71, 72]
    assert byte_level.decode(ids) == "dede"
    whole, texts = collect(byte_level, SamplingParams(stop=("de",), min_tokens=2), events(ids, [1, 1, 1]))
    assert (whole.text, whole.token_ids, texts) == ("de", ids, ["", "de", "", ""])
    whole, _ = collect(byte_level, SamplingParams(stop=("de",), min_tokens=1), events(ids, [1, 1, 1]))
    assert (whole.text, whole.token_ids) == ("", ids[:2])


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR])
def test_held_text_is_flushed_at_the_end(byte_level: Tokenizer, finish: FinishReason) -> None:
    ids = byte_level.encode("a ST", add_special_tokens=False)
    text = SequenceText(byte_level, SamplingParams(stop=("STOP",)), [0])
    stream = events(ids, [len(ids)], finish)
    assert [text.push(event).text for event in stream] == ["a ", "ST"]
    assert stream[-1].token_ids == []


def test_incomplete_character_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🙂", add_special_tokens=False)[:-1]
    whole, _ = collect(byte_level, SamplingParams(), events(ids, [1, 1]))
    assert whole.text == "a\ufffd"


def test_events_after_the_end_are_empty(byte_level: Tokenizer) -> None:
    text = SequenceText(byte_level, SamplingParams(stop=("d",)), [0])
    first, second = events([71, 72, 73], [1])
    assert text.push(first).is_stop_string_hit
    assert text.is_finished
    assert text.push(second) == TextDelta(token_ids=[])


def test_without_detokenizing(byte_level: Tokenizer) -> None:
    whole, _ = collect(byte_level, SamplingParams(detokenize=False), events([71, 72, EOS], [1, 1], FinishReason.STOP))
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("", [71, 72, EOS], FinishReason.STOP)
