from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from tokenmill_engine.errors import InvalidRequest, UnsupportedParameter
from tokenmill_engine.generation_defaults import GenerationDefaults, GenerationRules
from tokenmill_engine.sampling_params import SamplingParams

MODEL = SimpleNamespace(eos_token_id=7)


def defaults_of(**settings: Any) -> GenerationDefaults:
    return GenerationDefaults.from_model(GenerationConfig(**settings), MODEL, 9)


@pytest.mark.parametrize(
    ("file", "model", "tokenizer", "expected"),
    [
        (3, 7, 9, {3}),
        ([3, 4], 7, 9, {3, 4}),
        (0, 7, 9, {0}),
        (None, 7, 9, {7}),
        (None, [7, 8], 9, {7, 8}),
        (None, None, 9, {9}),
        (None, None, None, set()),
    ],
)
def test_end_tokens_come_from_the_file_then_the_model_then_the_tokenizer(
    file: Any, model: Any, tokenizer: int | None, expected: set[int]
) -> None:
    found = GenerationDefaults.from_model(
        GenerationConfig(eos_token_id=file), SimpleNamespace(eos_token_id=model), tokenizer
    )
    assert found.eos_token_ids == expected


def test_without_a_file_the_models_end_token_and_our_defaults_hold() -> None:
    found = GenerationDefaults.from_model(None, MODEL)
    assert found.eos_token_ids == {7}
    assert found.apply({}) == SamplingParams()
    assert found.notes == ()


def test_only_what_the_file_sets_becomes_a_default() -> None:
    """In particular not the top-k of 50 that transformers would fill in."""
    assert defaults_of(temperature=0.6, top_p=0.9).apply({}) == SamplingParams(
        temperature=0.6, top_p=0.9
    )
    everything = defaults_of(
        temperature=0.7, top_k=20, top_p=0.8, min_p=0.01, repetition_penalty=1.1, max_new_tokens=99
    )
    assert everything.apply({}) == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.8, min_p=0.01, repetition_penalty=1.1, max_tokens=99
    )


def test_the_request_overrides_the_file_even_with_the_usual_default() -> None:
    file = defaults_of(temperature=0.6, top_k=20)
    explicit = {"temperature": 1.0, "top_k": 0, "max_tokens": 5}
    assert file.apply(explicit) == SamplingParams(max_tokens=5)


def test_do_sample_false_does_not_make_requests_greedy() -> None:
    assert defaults_of(do_sample=False).apply({}).temperature == 1.0
    assert defaults_of(do_sample=False).notes == ()


def test_suppressed_tokens_and_bad_words_are_taken_over() -> None:
    found = defaults_of(
        suppress_tokens=[1, 2],
        begin_suppress_tokens=[3],
        bad_words_ids=[[4], [5, 6], [8]],
        eos_token_id=[8, 9],
    )
    assert found.rules == GenerationRules((1, 2), (3,), ((4,), (5, 6)))


def test_settings_without_effect_are_noted_and_neutral_ones_are_not() -> None:
    found = defaults_of(no_repeat_ngram_size=3, num_beams=4, typical_p=1.0, min_length=0)
    assert found.notes == (
        "generation_config.json sets no_repeat_ngram_size, which is not supported",
        "generation_config.json sets num_beams, which is not supported",
    )


def test_a_default_out_of_our_limits_is_ignored_with_a_note() -> None:
    file = SimpleNamespace(to_diff_dict=lambda: {"temperature": 500.0, "top_p": 0.5})
    found = GenerationDefaults.from_model(file, MODEL)
    assert found.apply({}) == SamplingParams(top_p=0.5)
    (note,) = found.notes
    assert "temperature" in note


def test_unknown_parameters_are_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(UnsupportedParameter, match="top_p") as caught:
        defaults_of().apply({"best_of": 4})
    assert caught.value.field == "best_of"


def test_a_value_out_of_its_limits_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        defaults_of(top_k=20).apply({"top_p": 1.5})
    assert caught.value.field == "top_p"
