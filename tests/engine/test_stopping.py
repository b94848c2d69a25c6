"""When a request has all its tokens."""

from __future__ import annotations

import pytest

from support_engine import EOS, make_request
from tokenmill_engine.config import SchedulerConfig
from tokenmill_engine.request import FinishReason
from tokenmill_engine.stopping import Stop, check_stop

CONFIG = SchedulerConfig(max_model_len=10)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ([], {}, None),
        ([5], {}, None),
        ([EOS], {}, Stop(STOP)),
        ([EOS], {"ignore_eos": True}, None),
        ([EOS], {"ignore_eos": True, "stop_token_ids": [EOS]}, Stop(STOP, EOS)),
        ([EOS], {"stop_token_ids": [EOS]}, Stop(STOP)),
        ([EOS, 5], {}, None),
        ([5, 7], {"stop_token_ids": [6, 7]}, Stop(STOP, 7)),
        ([5, 6], {"max_tokens": 2}, Stop(LENGTH)),
        ([5, EOS], {"max_tokens": 2}, Stop(STOP)),
        ([5, 6], {"max_tokens": 3}, None),
        ([EOS], {"min_tokens": 2}, None),
        ([7], {"min_tokens": 2, "stop_token_ids": [7]}, None),
        ([5, EOS], {"min_tokens": 2}, Stop(STOP)),
        ([5, EOS], {"min_tokens": 2, "max_tokens": 2, "ignore_eos": True}, Stop(LENGTH)),
        ([5] * 5, {}, None),
        ([5] * 6, {}, Stop(LENGTH)),  # four prompt tokens and these reach max_model_len
        ([5] * 5 + [EOS], {}, Stop(STOP)),
        ([5] * 6, {"min_tokens": 8}, Stop(LENGTH)),
    ],
)
def test_the_newest_token_decides(output, params, expected) -> None:
    request = make_request(prompt=4, output=output, **params)
    assert check_stop(request, CONFIG) == expected


def test_an_end_of_sequence_in_the_prompt_ends_nothing() -> None:
    assert check_stop(make_request(prompt=[5, EOS]), CONFIG) is None
