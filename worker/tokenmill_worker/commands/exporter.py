"""`tokenmill exporter`: the numbers of a queue for Prometheus and for autoscalers."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import closing

import click

from tokenmill import Client
from tokenmill._redis import redis_url
from tokenmill.cli.connection import Connection, connection_options, pass_connection
from tokenmill_worker.endpoints import Endpoints
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.exporter import Exporter, PoolReader
from tokenmill_worker.logs import fields, set_up_logging

logger = logging.getLogger(__name__)

#: A scrape must fail before its scraper gives up, which is after ten seconds by default.
REDIS_TIMEOUT_S = 2.0


@click.command(
    "exporter",
    context_settings={"max_content_width": 100},
    epilog="""\b
Examples:
  tokenmill --pool chat exporter --host 0.0.0.0 --port 9400
  curl -s localhost:9400/scaling""",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, envvar="TOKENMILL_EXPORTER_HOST",
    show_envvar=True, help="Where to listen.",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=9400, show_default=True,
    envvar="TOKENMILL_EXPORTER_PORT", show_envvar=True, help="0 takes a free one and logs it.",
)  # fmt: skip
@click.option(
    "--max-age-s", type=click.FloatRange(0, 3600), default=2.0, show_default=True,
    help="What was read of Redis serves everybody who asks for so long.",
)  # fmt: skip
@click.option(
    "--assumed-tokens-per-s", type=click.FloatRange(0, min_open=True), default=500.0,
    show_default=True, envvar="TOKENMILL_ASSUMED_TOKENS_PER_S", show_envvar=True,
    help="Speed of one worker, until a worker has measured it.",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(["plain", "json"]), default="plain", show_default=True,
    envvar="TOKENMILL_LOG_FORMAT", show_envvar=True, help="Form of a log line.",
)  # fmt: skip
@connection_options()
@pass_connection
def exporter(
    connection: Connection,
    /,
    *,
    host: str,
    port: int,
    max_age_s: float,
    assumed_tokens_per_s: float,
    log_format: str,
) -> None:
    """Serve depth, age, backlog and workers of one pool: /metrics, and /scaling as JSON.

    The numbers are those of the whole pool and come from Redis alone, so one exporter is enough,
    and it also speaks while no worker runs.
    """
    set_up_logging("info", "json" if log_format == "json" else "plain", "exporter")
    with closing(_client(connection)) as client:
        reader = PoolReader(client, redis_url(connection.redis_url), max_age_s)
        routes = Exporter(reader, connection.pool, assumed_tokens_per_s).routes()
        try:
            endpoints = Endpoints(host, port, routes, option="--port")
        except SettingsError as error:
            raise click.UsageError(str(error)) from None
        logger.info("exporter ready", extra=fields(address=endpoints.address, pool=connection.pool))
        _until_asked_to_stop()
        endpoints.close()


def _client(connection: Connection) -> Client:
    return Client(
        connection.redis_url,
        namespace=connection.namespace,
        pool=connection.pool,
        insecure=connection.insecure_redis,
        timeout_s=REDIS_TIMEOUT_S,
        connect_timeout_s=REDIS_TIMEOUT_S,
        retry_for_s=0,
    )


def _until_asked_to_stop() -> None:
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    asked.wait()
