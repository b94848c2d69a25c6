"""`/metrics`, `/healthz` and `/readyz`, on a thread: they answer while the loop is busy."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .errors import SettingsError, describe
from .logs import fields

logger = logging.getLogger(__name__)

#: `close` is noticed after so long: it is the last thing that a worker waits for.
POLL_S = 0.05
#: A body and its content type.
Reply = tuple[HTTPStatus, bytes, str]
Route = Callable[[], Reply]


def json_reply(ok: bool, facts: dict[str, object]) -> Reply:
    status = HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE
    return status, json.dumps(facts).encode(), "application/json"


class Endpoints:
    """An HTTP server for GET on the given routes. Its port is known once it is made; `option` is
    how the user chose it.

    Raises:
        SettingsError: the address cannot be listened on.
    """

    def __init__(
        self, host: str, port: int, routes: dict[str, Route], *, option: str = "metrics_port"
    ) -> None:
        handler = type("Handler", (_Handler,), {"routes": routes})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise SettingsError(
                f"{option}: cannot listen on {host}:{port} ({error.strerror}); "
                "choose another, or 0 for a free one"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="endpoints", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A prober that hangs up is no trouble of ours; what else went wrong is a log line."""
        error = sys.exception()
        assert error is not None  # socketserver calls this while it handles one
        if isinstance(error, ConnectionError):
            logger.debug("prober hung up", extra=fields(error=describe(error)))
        else:
            logger.error("no answer to a prober", extra=fields(error=describe(error)))


class _Handler(BaseHTTPRequestHandler):
    routes: dict[str, Route]
    timeout = 10  # seconds for a client to send its request

    def do_GET(self) -> None:
        route = self.routes.get(self.path.partition("?")[0])
        if route is None:
            status, body, content_type = HTTPStatus.NOT_FOUND, b"not found\n", "text/plain"
        else:
            status, body, content_type = route()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a log line."""
