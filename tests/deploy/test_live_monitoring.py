"""Every expression of every dashboard has an answer, asked of a Prometheus that scrapes a pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deploy.dashboards.__main__ import dashboards
from deploy.dashboards.panels import Json

from support_prometheus import (
    Prometheus,
    configuration,
    exporter,
    find_prometheus,
    free_port,
    prometheus,
)
from support_redis import unique_keyspace
from support_worker_process import Pool, eventually
from tokenmill.embedded import EmbeddedServer

pytestmark = pytest.mark.slow
#: Long enough for a rate over scrapes of a second.
RATE_INTERVAL = "20s"
NUM_REQUESTS = 40


@pytest.fixture(scope="module")
def scraped(
    server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Two workers, an exporter and Prometheus, after and during some load."""
    binary = find_prometheus()
    if binary is None:
        pytest.skip("Prometheus is not here; `make deploy-check` gets it")
    folder = tmp_path_factory.mktemp("prometheus")
    pool = Pool(server, unique_keyspace(), folder)
    ports, exporter_port = [free_port(), free_port()], free_port()
    try:
        for number, port in enumerate(ports):
            pool.start_ready(f"w{number}", metrics_port=port, max_num_seqs=4)
        with (
            exporter(pool, exporter_port),
            prometheus(binary, folder, configuration(ports, exporter_port)) as found,
        ):
            eventually(lambda: found.targets_up() == 3)
            for number in range(NUM_REQUESTS):
                pool.submit(f"a{number}", max_tokens=20)
            eventually(
                lambda: found.query("sum(rate(vllm:request_success_total[20s])) > 0"), timeout_s=60
            )
            yield found
    finally:
        for worker in pool.workers:
            worker.kill()
        pool.client.close()


def expressions(dashboard: Json) -> list[str]:
    return [
        target["expr"]
        .replace("$__rate_interval", RATE_INTERVAL)
        .replace("$pool", ".*")
        .replace("$worker", ".*")
        for panel in dashboard["panels"]
        if panel["type"] != "row"
        for target in panel["targets"]
    ]


#: Drawn only where there is something of it.
EMPTY_WITHOUT = ("prefix_cache",)


@pytest.mark.parametrize("name", dashboards())
def test_every_expression_has_an_answer(scraped: Prometheus, name: str) -> None:
    for expression in expressions(dashboards()[name]):
        if not any(part in expression for part in EMPTY_WITHOUT):
            assert scraped.query(expression), expression


def test_the_healthy_pool_raises_no_alarm(scraped: Prometheus) -> None:
    assert scraped.query('ALERTS{alertstate="firing"}') == []


def test_the_exporter_counts_the_workers_by_their_state(scraped: Prometheus) -> None:
    found = scraped.query("tokenmill_queue_workers")
    counts = {each["metric"]["state"]: int(each["value"][1]) for each in found}
    assert counts == {"loading": 0, "ready": 2, "draining": 0}


def test_recorded_series_are_there(scraped: Prometheus) -> None:
    for name in ("tokenmill:generation_tokens:rate1m", "tokenmill:failed_requests:ratio5m"):
        eventually(lambda name=name: scraped.query(name))


def test_the_series_of_workers_and_exporter_join_by_their_pool(scraped: Prometheus) -> None:
    running, waiting = "sum by (pool) (vllm:num_requests_running)", "tokenmill_queue_waiting"
    (found,) = scraped.query(f"{running} + on (pool) {waiting}")
    assert found["metric"] == {"pool": "default"}
