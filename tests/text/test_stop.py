from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.stop import StopStrings


def run(pieces: list[str], stops: list[str], *, is_included: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops, is_included=is_included)
    out: list[str] = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, matcher.flush()], None


def oracle(text: str, stops: list[str], *, is_included: bool) -> tuple[str, str | None]:
    """The shortest beginning of the text that ends in a stop string, without it; by trying every beginning."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if is_included else end - len(stop)], stop
    return text, None


LETTERS = st.text(alphabet="abc", max_size=16)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4, unique=True)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS, is_included=st.booleans())
def test_equals_the_oracle_for_every_chunking(pieces: list[str], stops: list[str], is_included: bool) -> None:
    expected_text, expected_stop = oracle("".join(pieces), stops, is_included=is_included)
    for chunks in (pieces, ["".join(pieces)], list("".join(pieces))):
        out, stop = run(chunks, stops, is_included=is_included)
        assert (stop, "".join(out)) == (expected_stop, expected_text)


@given(text=LETTERS, stops=STOPS)
def test_holds_back_only_what_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    expected, stop = oracle(text, stops, is_included=False)
    matcher = StopStrings(stops)
    sent = ""
    for i, char in enumerate(text):
        released, hit = matcher.push(char)
        sent += released
        if hit is not None:
            break
        held = text[len(sent) : i + 1]
        assert text[: i + 1] == sent + held
        assert not held or any(s.startswith(held) for s in stops)
        assert len(held) <= max(map(len, stops), default=1) - 1
    assert sent + (matcher.flush() if stop is None else "") == expected


def test_by_hand() -> None:
    assert run(["The ans", "wer\n", "\nQ: more"], ["\n\nQ:"]) == (["The ans", "wer", ""], "\n\nQ:")
    assert run(["a<", "b"], ["</x>"]) == (["a", "<b", ""], None)
    assert run(["xab"], ["b", "ab"]) == (["x"], "ab"), "both complete at once: the longest"
    assert run(["xabc"], ["abc", "b"]) == (["xa"], "b"), "b completes first"
    assert run(["xENDy"], ["END"], is_included=True) == (["xEND"], "END")
    assert run(["keep", " STO"], ["STOP"]) == (["keep", " ", "STO"], None)


def test_region_without_matches() -> None:
    matcher = StopStrings(["ab"])
    assert matcher.push("xab", can_match=False) == ("xab", None)
    assert matcher.push("ya", can_match=False) == ("y", None)
    assert matcher.push("b") == ("", "ab"), "completed after the region"
    matcher = StopStrings(["aa", "ba"])
    assert matcher.push("aa", can_match=False) == ("a", None)
    assert matcher.push("x") == ("ax", None), "a match inside the region does not come back"


@pytest.mark.parametrize("stops", [["a" * 1024] * 4, ["ab" * 512]])
def test_long_stop_strings(stops: list[str]) -> None:
    matcher = StopStrings(stops)
    sent = "".join(matcher.push("a").text for _ in range(1000))
    assert sent + matcher.flush() == "a" * 1000
