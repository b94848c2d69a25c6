"""What spans are called and what they say, by OpenTelemetry's conventions.

Those for messaging and for generative AI; in one place, because the latter still change.
Names, numbers and codes only: no span holds text of a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json

from .keys import GROUP, Keyspace

#: Body field → attribute.
_REQUESTED: Final = {
    "model": "gen_ai.request.model",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
Attributes = dict[str, str | int | float | bool | list[str]]


def destination_of(keys: Keyspace) -> str:
    """The queue, as spans name it."""
    return f"{keys.namespace}:{keys.pool}"


def message_attributes(keys: Keyspace, request_id: str) -> Attributes:
    """Of every span that sends or processes a request."""
    return {
        "messaging.system": "redis",
        "messaging.destination.name": destination_of(keys),
        "messaging.destination.partition.id": str(keys.partition),
        "messaging.message.id": request_id,
        "tokenmill.request.id": request_id,
    }


def process_attributes(keys: Keyspace, request_id: str, worker_id: str) -> Attributes:
    """Of a worker's span."""
    return message_attributes(keys, request_id) | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": GROUP,
        "messaging.client.id": worker_id,
    }


def request_attributes(body: str) -> Attributes:
    """What a request asks for; a body that is no request asks for nothing."""
    try:
        request = from_json(body)
    except ValueError:
        request = None
    fields: Mapping[str, Any] = request if isinstance(request, Mapping) else {}
    asked: Attributes = {
        "gen_ai.operation.name": "chat" if "messages" in fields else "text_completion",
        "gen_ai.provider.name": "tokenmill",
        "gen_ai.request.stream": True,
    }
    for name, attribute in _REQUESTED.items():
        value = fields.get(name)
        if isinstance(value, str | int | float):
            asked[attribute] = value
    return asked


def span_name(attributes: Attributes, model: str | None = None) -> str:
    """`chat` or `text_completion`, and the model where it is known."""
    operation = str(attributes["gen_ai.operation.name"])
    model = model or str(attributes.get("gen_ai.request.model", ""))
    return f"{operation} {model}".strip()
