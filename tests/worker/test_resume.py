"""Reading the log of earlier attempts."""

from __future__ import annotations

import pytest

from tokenmill_engine.errors import ResumeMismatch
from tokenmill_worker.conversion import Published
from tokenmill_worker.resume import fold_log

START = '{"e":1,"ev":"start","i":0,"a":1}'


def test_tokens_and_characters_of_all_attempts_are_joined() -> None:
    events = [
        START,
        '{"e":2,"i":0,"k":[5,6],"t":"aé","a":1}',
        '{"e":3,"ev":"start","i":2,"a":2}',
        '{"e":4,"i":2,"k":[7],"t":"","a":2}',
        '{"e":5,"ev":"news-from-the-future","a":2}',
    ]

    assert fold_log(events) == Published((5, 6, 7), 2)


def test_an_empty_log_is_a_fresh_start() -> None:
    assert fold_log([]) == Published((), 0)


@pytest.mark.parametrize(
    "events",
    [
        [START, '{"e":2,"i":1,"k":[5],"t":"","a":1}'],
        [START, '{"e":3,"i":0,"k":[5],"t":"","a":1}'],
        [START, '{"e":2,"i":0,"k":["secret"],"t":"","a":1}'],
        [START, "secret"],
        [START, "[1]"],
    ],
)
def test_a_log_that_no_worker_wrote_is_refused(events: list[str]) -> None:
    with pytest.raises(ResumeMismatch) as refused:
        fold_log(events)

    assert "secret" not in str(refused.value)
