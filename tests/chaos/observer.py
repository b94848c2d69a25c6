"""A bare subscriber of every channel of a pool: what could have reached a client, in order."""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from types import TracebackType
from typing import Any, Self

from tokenmill._redis import connect
from tokenmill.keys import Keyspace

#: Under the name of this request the observer talks to itself.
MARKERS = "observer-marker"


class Observer:
    """`messages` holds the payloads per request id, as Redis sent them."""

    def __init__(self, url: str, keys: Keyspace) -> None:
        self.messages: dict[str, list[str]] = defaultdict(list)
        self._markers: set[str] = set()
        self._keys = keys
        self._client = connect(url)
        self._pubsub: Any = self._client.pubsub()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._pubsub.psubscribe(self._keys.channel("*"))
        confirmation = self._pubsub.get_message(timeout=5)
        assert confirmation, "no confirmation of the subscription"
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self.count()  # nothing is left unheard
        self._closing.set()
        self._thread.join(5)
        self._pubsub.close()
        self._client.close()

    def count(self) -> int:
        """Messages so far: all that were published before this call have been heard when it ends.

        Redis sends to one connection in the order of publication, so a message of our own is last.
        """
        marker = secrets.token_hex(8)
        self._client.publish(self._keys.channel(MARKERS), marker)
        give_up_at = time.monotonic() + 10
        while marker not in self._markers:
            assert time.monotonic() < give_up_at, "the observer is deaf"
            time.sleep(0.01)
        return sum(map(len, list(self.messages.values())))

    def _run(self) -> None:
        while not self._closing.is_set():
            message = self._pubsub.get_message(timeout=0.05)
            if message is not None and message["type"] == "pmessage":
                request_id = self._keys.request_of_channel(message["channel"])
                if request_id == MARKERS:
                    self._markers.add(message["data"])
                else:
                    self.messages[request_id].append(message["data"])
