"""The servers that scenarios run on."""

from __future__ import annotations

from pathlib import Path

import pytest

REDIS_7 = Path("/usr/bin/redis-server")
#: The embedded Valkey, and what Debian installs.
BOTH_SERVERS = [
    pytest.param(None, id="valkey"),
    pytest.param(
        REDIS_7,
        id="redis-server",
        marks=pytest.mark.skipif(
            not REDIS_7.exists(),
            reason="needs Redis 7.0 as Debian installs it: apt-get install redis-server",
        ),
    ),
]
