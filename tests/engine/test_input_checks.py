from __future__ import annotations

from typing import Any

import pytest

from tokenmill_engine.errors import InvalidRequest
from tokenmill_engine.input_checks import check_prompt_token_ids, check_text, validate_params
from tokenmill_engine.sampling_params import SamplingParams

VOCAB = 100


def spell(words: tuple[str, ...]) -> list[list[int]]:
    """Pretends that a word is one token whose id is its length."""
    return [[len(word)] for word in words]


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("stop_token_ids", [0, 99], [100]),
        ("allowed_token_ids", [0, 99], [5, 100]),
        ("logit_bias", {99: 1.0}, {100: 1.0}),
        ("bad_words", ["a" * 99], ["a" * 100]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_field(
    field: str, inside: Any, outside: Any
) -> None:
    validate_params(SamplingParams(**{field: inside}), VOCAB, spell)
    with pytest.raises(InvalidRequest, match=r"0 to 99") as caught:
        validate_params(SamplingParams(**{field: outside}), VOCAB, spell)
    assert caught.value.field == field


@pytest.mark.parametrize("token_ids", [[], [-1], [100], [1.0], [True], ["7"], [None]])
def test_a_malformed_prompt_of_ids_is_refused(token_ids: list[Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_prompt_token_ids(token_ids, VOCAB)
    assert caught.value.field == "prompt_token_ids"


def test_a_prompt_of_ids_may_use_the_whole_vocabulary() -> None:
    check_prompt_token_ids([0, VOCAB - 1], VOCAB)


@pytest.mark.parametrize("text", ["half \ud83d of a pair", "\udc00", b"bytes", None, 7])
def test_what_is_no_text_is_refused_without_repeating_it(text: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_text("prompt", text)
    assert caught.value.field == "prompt"
    assert "half" not in str(caught.value).replace("half of a surrogate", "")


def test_a_stop_string_must_be_valid_unicode() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_params(SamplingParams(stop="\ud800"), VOCAB, spell)
    assert caught.value.field == "stop"
