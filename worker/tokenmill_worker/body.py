"""From the text of a request body to a validated `GenerateRequest`, whatever the text is."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tokenmill import limits
from tokenmill._validation import check_json
from tokenmill.errors import InvalidRequest, RequestTooLarge, UnsupportedParameter
from tokenmill.protocol import GenerateRequest


def parse_body(body: str) -> GenerateRequest:
    """Validate a request body.

    Raises:
        InvalidRequest: or a subclass; it names the field and the limit, never a value.
    """
    if len(body.encode(errors="replace")) > limits.MAX_BODY_BYTES:
        raise RequestTooLarge("body", f"must be at most {limits.MAX_BODY_BYTES} bytes")
    # A body may be made to exhaust the parser: that is the request's fault, not the worker's.
    try:
        data = json.loads(body, parse_constant=_refuse_constant)
        _check_depth(data)
        request = GenerateRequest.model_validate(data)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)[0]) from None
    except RecursionError:
        raise _too_deep() from None
    except MemoryError:
        raise InvalidRequest("body", "takes too much memory to read") from None
    except ValueError:  # no JSON, or a number of thousands of digits
        raise InvalidRequest("body", "must be a JSON object") from None
    _check_free_json(request)
    return request


def _refuse_constant(_name: str) -> NoReturn:
    raise InvalidRequest("body", "NaN and Infinity are no JSON numbers")


def _too_deep() -> InvalidRequest:
    return InvalidRequest("body", f"must be nested at most {limits.MAX_JSON_DEPTH} deep")


def _check_depth(data: Any) -> None:
    level: list[Any] = [data]
    for _ in range(limits.MAX_JSON_DEPTH + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise _too_deep()


def _children(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    return item if isinstance(item, list) else []


def _check_free_json(request: GenerateRequest) -> None:
    """What the wire does not describe must still be JSON that every language can read: Python's
    own parser lets infinity (`1e999`) and halves of surrogate pairs through."""
    check_json("chat_template_kwargs", request.chat_template_kwargs)
    if request.meta is None:
        return
    check_json("meta", request.meta)
    if len(json.dumps(request.meta, ensure_ascii=False).encode()) > limits.MAX_META_BYTES:
        raise InvalidRequest("meta", f"must be at most {limits.MAX_META_BYTES} bytes of JSON")


def _refusal(error: ErrorDetails) -> InvalidRequest:
    """The first validation error, as ours. Of its location only names of our own are repeated."""
    location = error["loc"]
    if error["type"] == "extra_forbidden" and len(location) == 1:
        supported = ", ".join(sorted(GenerateRequest.model_fields))
        return UnsupportedParameter(
            _printable(str(location[0])), f"not supported; the parameters are: {supported}"
        )
    known = location and str(location[0]) in GenerateRequest.model_fields
    field = ".".join(
        [str(location[0]), *(str(part) for part in location[1:] if isinstance(part, int))]
        if known
        else ["body"]
    )
    message = error["msg"].removeprefix("Value error, ")
    return InvalidRequest(field, message[:1].lower() + message[1:])


def _printable(name: str) -> str:
    """An unknown parameter's name comes from outside: keep it short and on one line."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in name[:64])
