"""A word that callers send and nobody else may read, and where it is looked for."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import urlopen

import redis

from support_worker_process import Pool
from tokenmill.scripts import run

CANARY = "CanaryQzx17"
#: Wherever a request may carry text of its caller.
EVERYWHERE: dict[str, Any] = {
    "stop": [CANARY],
    "bad_words": [CANARY],
    "cache_salt": CANARY,
    "meta": {CANARY: CANARY},
    "max_tokens": 3,
}
CHAT = [{"role": "user", "name": CANARY, "content": CANARY}]
VALID: dict[str, dict[str, Any]] = {
    "valid-prompt": {"prompt": CANARY, **EVERYWHERE},
    "valid-chat": {"messages": CHAT, "chat_template_kwargs": {CANARY: CANARY}, **EVERYWHERE},
    "valid-logprobs": {"prompt": CANARY, "logprobs": 1, **EVERYWHERE},
}
INVALID: dict[str, dict[str, Any]] = {
    "invalid-number": {"prompt": CANARY, "temperature": CANARY},
    "invalid-model": {"prompt": CANARY, "model": CANARY},
    "invalid-role": {"messages": [{"role": CANARY, "content": CANARY}]},
    "invalid-part": {"messages": [{"role": "user", "content": [{"type": CANARY}]}]},
    "invalid-extra": {"messages": [{"role": "user", "content": "x", CANARY: CANARY}]},
    "invalid-bias": {"prompt": CANARY, "logit_bias": {CANARY: 1}},
    "invalid-meta": {"prompt": CANARY, "meta": {CANARY: CANARY * 1000}},
    "invalid-stop": {"prompt": CANARY, "stop": [CANARY * 100]},
    "invalid-template": {"messages": [{"role": "system", "content": CANARY}]},
    "invalid-length": {"prompt": CANARY * 1000},
    "invalid-refused": {"prompt": f"refuse {CANARY}"},
}


RAW: dict[str, str] = {
    "raw-json": f'{{"prompt": "{CANARY}", ',
    "raw-text": CANARY,
    "raw-deep": f'{{"{CANARY}": ' * 500,
    "raw-number": f'{{"prompt": "{CANARY}", "max_tokens": NaN}}',
}


def enqueue(pool: Pool, request_id: str, body: dict[str, Any]) -> None:
    run(pool.client, pool.calls.enqueue(request_id, body=json.dumps(body)))


def where_it_shows(pool: Pool) -> set[str]:
    """Keys whose name or content holds the word, but for what goes back to the caller only."""
    found = set()
    for key in pool.client.scan_iter(f"{pool.keys.prefix}*"):
        if CANARY in key + content_of(pool.client, key):
            found.add(key)
    return found


def content_of(client: redis.Redis, key: str) -> str:
    kind = client.type(key)
    if kind == "stream":
        return json.dumps([_without_meta(fields) for _, fields in client.xrange(key)])
    read = {
        "string": lambda: client.get(key),
        "hash": lambda: client.hgetall(key),
        "list": lambda: client.lrange(key, 0, -1),
        "zset": lambda: client.zrange(key, 0, -1),
    }[kind]
    return json.dumps(read())


def _without_meta(fields: dict[str, str]) -> Any:
    """An end event repeats `meta` for the caller, who alone reads the log."""
    if fields.keys() != {"d"}:
        return fields
    event = json.loads(fields["d"])
    event.pop("meta", None)
    return event


def read_metrics(pool: Pool) -> str:
    """Of the only worker."""
    (card,) = pool.cards()
    with urlopen(f"http://{card['metrics']}/metrics", timeout=10) as reply:
        return str(reply.read().decode())
