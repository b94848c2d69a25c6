from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import pytest

from support_tokenizers import MAKERS, SPECIAL, TEXTS, byte_level_bpe, llama_byte_fallback
from tokenmill_engine.detokenizer import Detokenizer, TextDelta
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_engine.tokenizer import Tokenizer

PLAIN = SamplingParams()
make_tokenizer = cache(lambda name: MAKERS[name]())
KINDS = pytest.mark.parametrize("kind", MAKERS)


def deltas(tokenizer: Tokenizer, params: SamplingParams, ids: Sequence[int]) -> list[str]:
    """One delta for each id, then the flush."""
    detokenizer = Detokenizer(tokenizer, params)
    found = [detokenizer.push([token_id]).text for token_id in ids]
    return [*found, detokenizer.finish()]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer._encode(text, add_special_tokens=False)


def fuzz(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Random ids, half of them stretches of real text so that characters do complete."""
    rng = np.random.default_rng(7)
    texts = [ids for text in TEXTS if (ids := ids_of(tokenizer, text))]
    sequences = []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < length:
            if rng.random() < 0.5:
                ids += rng.integers(0, len(tokenizer), int(rng.integers(1, 6))).tolist()
            else:
                text = texts[int(rng.integers(len(texts)))]
                start = int(rng.integers(len(text)))
                ids += text[start : start + int(rng.integers(1, 12))]
        sequences.append(ids[:length])
    return sequences


@KINDS
@pytest.mark.parametrize("text", TEXTS)
def test_deltas_of_a_text_are_its_decode_and_never_half_a_character(kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = ids_of(tokenizer, text)
    found = deltas(tokenizer, PLAIN, ids)
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(found) == expected
    if "\ufffd" not in expected:
        assert not any("\ufffd" in delta for delta in found)
        assert found[-1] == ""  # whole characters, so that nothing is left to flush


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "llama_byte_fallback"])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_deltas_of_random_ids_are_their_decode(kind: str, skip_special_tokens: bool) -> None:
    tokenizer = make_tokenizer(kind)
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    for ids in fuzz(tokenizer, 300 if tokenizer._backend else 30, 40):
        expected = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        assert "".join(deltas(tokenizer, params, ids)) == expected


def lenient_decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Llama's decoder, except that the bytes of a run become text as soon as they are some."""
    names = [tokenizer._backend.id_to_token(token_id) for token_id in ids]
    names = [name for name in names if name not in {"<unk>", *SPECIAL}]
    text = ""
    for is_byte, run in itertools.groupby(names, lambda name: name.startswith("<0x")):
        names_in_run = list(run)
        words = "".join(names_in_run).replace("▁", " ")
        text += _bytes_to_text(names_in_run) if is_byte else words
    return text.removeprefix(" ")


def _bytes_to_text(run: Iterable[str]) -> str:
    text, held = "", b""
    for name in run:
        held += bytes.fromhex(name[3:5])
        # A character that looks like a replacement waits too: it cannot be told from half a one.
        if (ahead := _decode_bytes(held))[-1] != "\ufffd":
            text, held = text + ahead, b""
    return text + _decode_bytes(held)


def _decode_bytes(raw: bytes) -> str:
    """As the byte fallback decoder does: all of it, or one replacement for each byte."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(raw)


def test_byte_fallback_keeps_released_characters_when_a_run_turns_out_malformed() -> None:
    tokenizer = make_tokenizer("llama_byte_fallback")
    # The decoder strips a first space even if a byte spells it, which no text does: `▁` does.
    space = tokenizer._backend.token_to_id("<0x20>")
    for fuzzed in fuzz(tokenizer, 300, 40):
        ids = [token_id for token_id in fuzzed if token_id != space]
        expected = lenient_decode(tokenizer, ids)
        assert "".join(deltas(tokenizer, PLAIN, ids)) == expected


def test_a_line_feed_byte_is_released_at_once() -> None:
    tokenizer = make_tokenizer("llama_byte_fallback")
    feed = tokenizer._backend.token_to_id("<0x0A>")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["\n\n"]), ids_of(tokenizer, "the"))
    assert detokenizer.push([feed]) == TextDelta("")
    assert detokenizer.push([feed]) == TextDelta("", "\n\n")


@KINDS
@pytest.mark.parametrize("stop", [(), ("again", "日本", "st")])
def test_rebuilding_at_any_token_continues_identically(kind: str, stop: Sequence[str]) -> None:
    tokenizer = make_tokenizer(kind)
    params = SamplingParams(stop=list(stop), min_tokens=3, include_stop_str_in_output=bool(stop))
    for ids in [*fuzz(tokenizer, 4, 24), *(ids_of(tokenizer, text)[:24] for text in TEXTS[:3])]:
        at_once, one_by_one = Detokenizer(tokenizer, params), Detokenizer(tokenizer, params)
        whole = at_once.push(ids).text + at_once.finish()
        emitted = ""
        for split in range(len(ids) + 1):
            rebuilt = Detokenizer(tokenizer, params, ids[:split])
            assert rebuilt.emitted_chars == len(emitted) == one_by_one.emitted_chars
            assert rebuilt.stop_string == one_by_one.stop_string
            assert emitted + rebuilt.push(ids[split:]).text + rebuilt.finish() == whole
            if split < len(ids):
                emitted += one_by_one.push([ids[split]]).text


@KINDS
def test_stop_strings_cut_the_text_exactly(kind: str) -> None:
    """Against a search in the whole text, for every stop string that occurs in it."""
    tokenizer = make_tokenizer(kind)
    for text in TEXTS:
        ids = ids_of(tokenizer, text)
        full = tokenizer.decode(ids, skip_special_tokens=True)
        for start, size in itertools.product(range(0, len(full) - 6, 9), (1, 2, 5)):
            stop = full[start : start + size]
            for include in (False, True):
                params = SamplingParams(stop=stop, include_stop_str_in_output=include)
                detokenizer = Detokenizer(tokenizer, params)
                found = [detokenizer.push([token_id]) for token_id in ids]
                tail = detokenizer.finish()
                assert detokenizer.stop_string == stop
                cut = full.index(stop) + (len(stop) if include else 0)
                assert "".join(delta.text for delta in found) + tail == full[:cut]


def test_a_stop_string_ends_the_request_with_the_token_that_completes_it() -> None:
    tokenizer = make_tokenizer("byte_level_bpe")
    ids = ids_of(tokenizer, "The quick brown fox jumps")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="row"))
    for count, token_id in enumerate(ids, start=1):
        stopped = detokenizer.push([token_id]).stop_string is not None
        assert stopped == ("row" in tokenizer.decode(ids[:count]))
        if stopped:
            break
    assert detokenizer.num_tokens < len(ids)


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    tokenizer = make_tokenizer("byte_level_bpe")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["abc!", "bcx"]))
    released = [detokenizer.push([ids_of(tokenizer, char)[0]]).text for char in "zabcabcyab"]
    assert released == ["z", "", "", "", "abc", "", "", "abcy", "", ""]
    assert detokenizer.finish() == "ab"
    assert detokenizer.emitted_chars == len("zabcabcyab")


def test_min_tokens_defers_stop_strings_but_not_the_text() -> None:
    tokenizer = make_tokenizer("byte_level_bpe")
    ids = [ids_of(tokenizer, char)[0] for char in "xyxyxy"]

    def run(min_tokens: int) -> tuple[str, int]:
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop="xy", min_tokens=min_tokens))
        text = ""
        for count, token_id in enumerate(ids, start=1):
            delta = detokenizer.push([token_id])
            text += delta.text
            if delta.stop_string is not None:
                return text, count
        return text + detokenizer.finish(), len(ids)

    assert run(0) == ("", 2)
    assert run(1) == ("", 2)  # the match ends in the second token
    assert run(2) == ("xy", 4)
    assert run(3) == ("xy", 4)  # it began in the third token, and is still cut there
    assert run(4) == ("xyxy", 6)
    assert run(6) == ("xyxyxy", 6)


@pytest.mark.parametrize(
    ("include", "skip", "expected"),
    [(False, True, ""), (False, False, ""), (True, True, ""), (True, False, "</s>")],
)
def test_the_end_token_has_text_only_if_asked_for(include: bool, skip: bool, expected: str) -> None:
    tokenizer = make_tokenizer("byte_level_bpe")
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer, params, ids_of(tokenizer, "now"))
    assert tokenizer.eos_token_id is not None
    delta = detokenizer.push([tokenizer.eos_token_id], stop_token=True)
    assert delta.text + detokenizer.finish() == expected


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_that_is_a_word_is_left_out_as_in_vllm(include: bool) -> None:
    tokenizer = make_tokenizer("byte_level_bpe")
    *before, last = ids_of(tokenizer, "the lazy dog")
    params = SamplingParams(stop_token_ids=[last], include_stop_str_in_output=include)
    detokenizer = Detokenizer(tokenizer, params)
    text = detokenizer.push([*before, last], stop_token=True).text + detokenizer.finish()
    assert text == tokenizer.decode([*before, last] if include else before)


def test_nothing_is_released_after_a_stop_string() -> None:
    tokenizer = make_tokenizer("byte_level_bpe")
    ids = ids_of(tokenizer, "again and again")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="gain"))
    assert detokenizer.push(ids) == TextDelta("a", "gain")
    assert detokenizer.push(ids) == TextDelta("", "gain")
    assert detokenizer.finish() == ""


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    for tokenizer in (byte_level_bpe(), llama_byte_fallback()):
        ids = [*ids_of(tokenizer, "the"), 10_000, *ids_of(tokenizer, "the")]
        assert "".join(deltas(tokenizer, PLAIN, ids)) == tokenizer.decode(ids)
