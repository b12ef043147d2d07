from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import byte_fallback_backend, byte_level_backend, pretrained
from verifier_service.text import TextDelta, TextStream

BYTE_LEVEL = Tokenizer(pretrained(byte_level_backend()))
BYTE_FALLBACK = Tokenizer(pretrained(byte_fallback_backend()))
TEXTS = ["hello 🦜 world", "漢字かな交じり", "e\u0301 a\u0308 👩‍👩‍👧", "stop the end\n\nSTOP", "aaab aab ab", "x\ufffdy\ufffd"]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [token_id for token_id in tokenizer.encode(text) if token_id != 0]


def _cut(token_ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    edges = [0, *sorted({cut for cut in cuts if cut < len(token_ids)}), len(token_ids)]
    return [list(token_ids[start:end]) for start, end in pairwise(edges)]


def _stream(stream: TextStream, pieces: Sequence[Sequence[int]]) -> tuple[str, int, str | None]:
    """Text, kept tokens and matched stop string of a whole completion."""
    text, num_kept, matched = "", 0, None
    for piece in pieces:
        delta = stream.push(piece)
        text, num_kept, matched = text + delta.text, num_kept + delta.num_tokens_kept, delta.matched_stop
    return text + stream.finish(), num_kept, matched


def _reference(tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[str, int, str | None]:
    """The same from the definition: decode the first n tokens, for n = 1, 2, ..., until a stop string is in the text."""

    def first_match(text: str) -> tuple[int, int, str] | None:
        found = [(text.index(string) + len(string), text.index(string), string) for string in stop if string in text]
        return min(found, default=None)

    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count]).rstrip("\ufffd")
        if match := first_match(text):
            return text[: match[1]], count, match[2]
    text = tokenizer.decode(token_ids)
    match = first_match(text)  # in what was held back as an incomplete character: cut, but too late to be a reason
    return text[: match[1]] if match else text, len(token_ids), None


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_no_character_is_split_wherever_the_tokens_are(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    parts = [stream.push([token_id]).text for token_id in _ids(tokenizer, text)]
    whole = "".join(parts)
    assert whole == text.rstrip("\ufffd")
    assert whole + stream.finish() == text


def test_a_run_that_ends_inside_a_character_gives_the_characters_before_it() -> None:
    token_ids = _ids(BYTE_LEVEL, "hello 🦜")
    stream = TextStream(BYTE_LEVEL)
    assert stream.push(token_ids[:-1]) == TextDelta("hello ", len(token_ids) - 1)
    assert stream.push(token_ids[-1:]) == TextDelta("🦜", 1)


def test_incomplete_bytes_end_as_a_replacement_character() -> None:
    token_ids = _ids(BYTE_LEVEL, "ab🦜")[:-1]
    stream = TextStream(BYTE_LEVEL)
    assert stream.push(token_ids).text == "ab"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_are_no_text_and_added_words_are() -> None:
    stream = TextStream(BYTE_LEVEL)
    assert stream.push([0, *_ids(BYTE_LEVEL, "ab"), 1, 2, 1]) == TextDelta("ab<tool>", 5)
    assert stream.finish() == ""


def test_a_character_is_held_over_special_tokens() -> None:
    bird = _ids(BYTE_LEVEL, "🦜")
    stream = TextStream(BYTE_LEVEL)
    assert stream.push([*bird[:2], 1]).text == ""
    assert stream.push([1]).text == ""
    assert stream.push(bird[2:]).text == "🦜"


def test_the_last_token_can_be_counted_without_being_text() -> None:
    stream = TextStream(BYTE_LEVEL, stop=["hello"])
    token_ids = _ids(BYTE_LEVEL, "ab<tool>")
    assert stream.push(token_ids, last_is_silent=True) == TextDelta("ab", len(token_ids))
    assert TextStream(BYTE_LEVEL).push(token_ids, last_is_silent=True) == TextDelta("ab", len(token_ids))


def test_a_space_before_the_first_word_is_kept_after_a_prompt() -> None:
    prompt = BYTE_FALLBACK.encode("b")
    first = _ids(BYTE_FALLBACK, "a")
    assert TextStream(BYTE_FALLBACK, context_ids=prompt).push(first).text == " a"
    assert TextStream(BYTE_FALLBACK).push(first).text == "a"


def test_a_prompt_that_ends_inside_a_character_leaves_it_to_the_completion() -> None:
    token_ids = _ids(BYTE_LEVEL, "ab🦜d")
    stream = TextStream(BYTE_LEVEL, context_ids=token_ids[:-2])
    assert stream.push(token_ids[-2:]).text == "🦜d"


def test_bytes_that_a_decoder_re_judges_retract_nothing() -> None:
    # `<0xE4>` makes this decoder call the whole run of bytes before it rubbish.
    character = _ids(BYTE_FALLBACK, "漢")[-3:]
    a = _ids(BYTE_FALLBACK, "a")[-1]
    for pieces in ([[*character, character[0], a, *character]], [[*character], [character[0]], [a], character]):
        stream = TextStream(BYTE_FALLBACK, context_ids=BYTE_FALLBACK.encode("b"))
        text = "".join(stream.push(piece).text for piece in pieces) + stream.finish()
        assert text.endswith("漢")
        assert "a" in text
    stream = TextStream(BYTE_FALLBACK, context_ids=BYTE_FALLBACK.encode("b"))
    assert stream.push([*character, *character[:1]]).text == "漢"
    assert stream.push(character[1:]).text == "漢"


def test_endless_rubbish_comes_out_and_is_not_decoded_over_and_over() -> None:
    rubbish = _ids(BYTE_LEVEL, "🦜")[0]
    decoded = 0

    class Counting(Tokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            nonlocal decoded
            decoded = max(decoded, len(token_ids))
            return super().decode(token_ids)

    stream = TextStream(Counting(pretrained(byte_level_backend())))
    text = "".join(stream.push([rubbish] * 7).text for _ in range(200))
    assert len(text) > 1200
    assert len(text + stream.finish()) == 1400
    assert decoded < 160


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello world", ["world"], ("hello ", "world")),
        ("hello world", ["lo wo"], ("hel", "lo wo")),  # over several tokens
        ("aaab", ["aab"], ("a", "aab")),  # the first beginning of a match is none
        ("xstopstop", ["stop"], ("x", "stop")),
        ("xabc", ["abcd", "bc"], ("xa", "bc")),  # the one that completes first
        ("xabc", ["c", "abc", "bc"], ("x", "abc")),  # of those that complete together, the longest
        ("🦜 漢字", ["漢"], ("🦜 ", "漢")),
        ("e\u0301x", ["\u0301"], ("e", "\u0301")),
        ("hello", ["help", "lo!"], ("hello", None)),
    ],
)
def test_no_character_of_a_stop_string_is_sent(text: str, stop: list[str], expected: tuple[str, str | None]) -> None:
    for pieces in ([_ids(BYTE_LEVEL, text)], [[token_id] for token_id in _ids(BYTE_LEVEL, text)]):
        got, _, matched = _stream(TextStream(BYTE_LEVEL, stop), pieces)
        assert (got, matched) == expected


def test_what_may_become_a_stop_string_waits_and_comes_with_the_next_or_the_end() -> None:
    stream = TextStream(BYTE_LEVEL, ["stopped"])
    assert stream.push(_ids(BYTE_LEVEL, "ab stop")).text == "ab "
    assert stream.push(_ids(BYTE_LEVEL, " st")).text == "stop "
    assert stream.finish() == "st"


def test_tokens_after_a_stop_string_are_not_kept() -> None:
    token_ids = _ids(BYTE_LEVEL, "ab!cd")
    stream = TextStream(BYTE_LEVEL, ["!"])
    assert stream.push(token_ids) == TextDelta("ab", token_ids.index(_ids(BYTE_LEVEL, "!")[0]) + 1, "!")
    assert stream.push(token_ids) == TextDelta("", 0, "!")
    assert stream.finish() == ""


def test_a_stop_string_in_incomplete_bytes_is_cut_at_the_end() -> None:
    stream = TextStream(BYTE_LEVEL, ["b\ufffd"])
    assert stream.push(_ids(BYTE_LEVEL, "ab🦜")[:-1]).text == "a"
    assert stream.finish() == ""


_token_ids = st.lists(
    st.one_of(
        st.integers(0, BYTE_LEVEL.vocab_size - 1),  # any, so bytes in no order at all
        st.sampled_from(_ids(BYTE_LEVEL, "aabbstopST\n\n")),
        st.sampled_from(sorted(set(_ids(BYTE_LEVEL, "🦜漢字e\u0301\ufffd")))),
    ),
    max_size=24,
)
_texts = st.sampled_from(TEXTS).map(lambda text: _ids(BYTE_LEVEL, text))
_stops = st.lists(
    st.one_of(st.text("abs", min_size=1, max_size=4), st.sampled_from(["stop", "STOP", "🦜", "漢字", "\n\n", " w", "\ufffd", "\u0301 a"])), max_size=4
)


@settings(max_examples=400)
@given(token_ids=st.one_of(_token_ids, _texts), stop=_stops, cuts=st.lists(st.integers(1, 24), max_size=8))
def test_any_cut_into_messages_gives_what_the_definition_gives(token_ids: list[int], stop: list[str], cuts: list[int]) -> None:
    expected = _reference(BYTE_LEVEL, token_ids, stop)
    assert _stream(TextStream(BYTE_LEVEL, stop), _cut(token_ids, cuts)) == expected
    assert _stream(TextStream(BYTE_LEVEL, stop), [[token_id] for token_id in token_ids]) == expected


@settings(max_examples=200)
@given(token_ids=st.one_of(_token_ids, _texts), stop=_stops, cuts=st.lists(st.integers(1, 24), max_size=8))
def test_text_given_out_so_far_does_not_depend_on_the_cut(token_ids: list[int], stop: list[str], cuts: list[int]) -> None:
    pieces = _cut(token_ids, cuts)
    cut, single, resumed = TextStream(BYTE_LEVEL, stop), TextStream(BYTE_LEVEL, stop), TextStream(BYTE_LEVEL, stop)
    for piece in pieces:
        assert cut.push(piece).text == "".join([single.push([token_id]).text for token_id in piece])
    # A resumed request pushes the old tokens at once and throws their text away.
    resumed.push(token_ids)
    assert resumed.finish() == cut.finish() == single.finish()


@settings(max_examples=200)
@given(text=st.text("ab 漢🦜é", max_size=12), cuts=st.lists(st.integers(1, 24), max_size=8))
def test_any_cut_gives_the_text_with_byte_fallback_too(text: str, cuts: list[int]) -> None:
    token_ids = _ids(BYTE_FALLBACK, text)
    assert _stream(TextStream(BYTE_FALLBACK), _cut(token_ids, cuts))[0] == BYTE_FALLBACK.decode(token_ids)
