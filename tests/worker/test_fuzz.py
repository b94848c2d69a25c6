"""Whatever is put into the queue, it ends with a typed error and harms nobody."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support_fuzz import Campaign, Report
from support_fuzz_entries import hostile_entries
from support_worker_process import Pool, pool_of_workers
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace

SEED = 20_261_130
#: After the warm-up. A leaked request has several kilobytes.
GROWTH_BYTES_PER_ENTRY = 100


@pytest.fixture
def pool(server: EmbeddedServer, keyspace: Keyspace, tmp_path: Path) -> Iterator[Pool]:
    with pool_of_workers(server, keyspace, tmp_path) as pool:
        yield pool


def fuzz(pool: Pool, count: int) -> Report:
    worker = pool.start_ready("fuzzed", step_s=0.0, max_num_seqs=64)
    campaign = Campaign(pool, worker)
    report = campaign.run(hostile_entries(count, SEED))
    assert report.stuck == []
    assert report.outcomes["failed invalid_request"] > count // 5
    assert report.outcomes["done"] > 0
    assert "failed internal" not in report.outcomes
    campaign.check_end()
    return report


def test_a_thousand_hostile_entries_end_and_harm_nobody(pool: Pool) -> None:
    fuzz(pool, 1_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_thousand_hostile_entries_leave_the_memory_flat(pool: Pool) -> None:
    count = 20_000
    report = fuzz(pool, count)

    sys.stdout.write("\n" + "\n".join(report.lines()) + "\n")
    assert report.rss_growth_bytes < GROWTH_BYTES_PER_ENTRY * count
