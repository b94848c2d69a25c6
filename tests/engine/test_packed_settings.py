from __future__ import annotations

import numpy as np

from support_sampling import make_request
from tokenmill_engine.packed_settings import (
    LOG_MIN_P,
    POSITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SettingsPacker,
    pack_settings,
)


def test_every_setting_has_its_row() -> None:
    request = make_request(
        output=[1, 2], seed=2**63 + 5, temperature=0.5, top_k=9, top_p=0.25, min_p=0.125
    )
    packed = pack_settings([make_request(), request])
    numbers = packed.view(np.float64)
    assert packed[SEED].view(np.uint64).tolist() == [0, 2**63 + 5]
    assert packed[POSITION].tolist() == [0, 2]
    assert packed[TOP_K].tolist() == [0, 9]
    assert numbers[TEMPERATURE].tolist() == [1.0, 0.5]
    assert numbers[LOG_MIN_P].tolist() == [-np.inf, np.log(0.125)]
    assert numbers[TOP_P].tolist() == [1.0, 0.25]


def test_a_packer_follows_the_requests_from_step_to_step() -> None:
    first, second = make_request("a", temperature=0.7), make_request("b", top_k=3, seed=4)
    greedy = make_request("c", temperature=0)
    pack = SettingsPacker()
    batches = [[first], [first, second], [first, second], [second, first], [greedy, first], [first]]
    for requests in batches:
        packed = pack(requests)
        assert packed is not None
        assert np.array_equal(packed, pack_settings(requests))
        for request in requests:
            request.token_ids.append(1)


def test_greedy_requests_need_no_settings() -> None:
    greedy, other = make_request("a", temperature=0), make_request("b")
    pack = SettingsPacker()
    assert pack([greedy, greedy]) is None
    assert pack([greedy, greedy]) is None
    assert pack([greedy, other]) is not None
    assert pack([greedy]) is None
