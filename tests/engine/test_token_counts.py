from __future__ import annotations

from collections import Counter

import numpy as np

from support_sampling import make_request
from tokenmill_engine.token_counts import TokenCounts


def as_dict(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True))


def test_counts_equal_a_recount_however_the_tokens_arrived() -> None:
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, 300, 200).tolist(), rng.integers(0, 300, 400).tolist()
    request, counts = make_request(prompt=prompt), TokenCounts()
    while request.num_output_tokens < len(output):
        gained = int(rng.integers(0, 30))
        request.token_ids += output[request.num_output_tokens :][:gained]
        counts.update(request)
    expected = dict.fromkeys(prompt, 0) | Counter(output)
    assert as_dict(counts) == {token: expected[token] for token in as_dict(counts)}
    assert as_dict(counts).keys() == expected.keys()
    fresh = TokenCounts()
    fresh.update(request)
    assert as_dict(fresh) == as_dict(counts)
