"""What a model's own generation config says: end tokens, sampling defaults, tokens to suppress.

Precedence of a sampling parameter: the request, then what the *file* sets, then the defaults of
`SamplingParams`. What transformers fills in by itself (greedy, top-k 50) is not inherited, and
`do_sample: false` in the file does not make requests greedy: ask for `temperature=0`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Protocol, cast

from .errors import InvalidRequest, UnsupportedParameter
from .sampling_params import SamplingParams

#: Names in the file → our names.
_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
#: Settings that would change the output and are not offered, with the value that changes nothing.
_NOT_OFFERED: Mapping[str, object] = {
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "stop_strings": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
_PARAMETERS = frozenset(item.name for item in fields(SamplingParams))


class GenerationConfigLike(Protocol):
    """The one method used of `transformers.GenerationConfig`."""

    @property
    def to_diff_dict(self) -> Callable[[], dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class GenerationRules:
    """What the generation config imposes on the logits of every request."""

    suppress_token_ids: tuple[int, ...] = ()
    begin_suppress_token_ids: tuple[int, ...] = ()  # for the first output token only
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Build it with `from_model`. `notes` are sentences for the log: settings without effect."""

    eos_token_ids: frozenset[int] = frozenset()
    sampling: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    rules: GenerationRules = field(default_factory=GenerationRules)
    notes: tuple[str, ...] = ()

    @classmethod
    def from_model(
        cls,
        generation_config: GenerationConfigLike | None,
        model_config: object,
        tokenizer_eos_token_id: int | None = None,
    ) -> GenerationDefaults:
        """End tokens come from the generation config, else the model's, else the tokenizer's."""
        found = generation_config.to_diff_dict() if generation_config is not None else {}
        candidates = (
            found.get("eos_token_id"),
            getattr(model_config, "eos_token_id", None),
            tokenizer_eos_token_id,
        )
        eos = next((_as_ids(value) for value in candidates if value is not None), ())
        sampling, refused = _sampling_defaults(found)
        rules = GenerationRules(
            suppress_token_ids=_as_ids(found.get("suppress_tokens")),
            begin_suppress_token_ids=_as_ids(found.get("begin_suppress_tokens")),
            bad_word_ids=_bad_word_ids(found.get("bad_words_ids"), eos),
        )
        ignored = [
            name
            for name, neutral in _NOT_OFFERED.items()
            if (value := found.get(name)) is not None and value != neutral
        ]
        notes = (
            *(f"generation_config.json sets {name}, which is not supported" for name in ignored),
            *(f"generation_config.json is ignored where {message}" for message in refused),
        )
        return cls(frozenset(eos), MappingProxyType(sampling), rules, notes)

    def apply(self, explicit: Mapping[str, object]) -> SamplingParams:
        """The parameters of a request that set `explicit` itself.

        Raises:
            UnsupportedParameter: a name is not a sampling parameter.
            InvalidRequest: a value is out of its limits.
        """
        for name in explicit:
            if name not in _PARAMETERS:
                raise UnsupportedParameter(
                    name, f"is not supported; the parameters are {', '.join(sorted(_PARAMETERS))}"
                )
        return _params({**self.sampling, **explicit})


def _sampling_defaults(found: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Usable defaults, and what is wrong with the others."""
    defaults: dict[str, object] = {}
    refused: list[str] = []
    for name, ours in _SAMPLING.items():
        if (value := found.get(name)) is None:
            continue
        try:
            _params({ours: value})
        except InvalidRequest as error:
            refused.append(str(error))
        else:
            defaults[ours] = value
    return defaults, refused


def _params(values: Mapping[str, object]) -> SamplingParams:
    return SamplingParams(**cast(dict[str, Any], dict(values)))


def _as_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _bad_word_ids(
    value: Sequence[Sequence[int]] | None, eos: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """As transformers does, an end token standing alone is not taken for a bad word."""
    words = (tuple(word) for word in value or ())
    return tuple(word for word in words if word and not (len(word) == 1 and word[0] in eos))
