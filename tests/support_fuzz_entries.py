"""Malformed and extreme things to put into a queue: the same seed makes the same list."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tokenmill import limits
from tokenmill.protocol import GenerateRequest

Fields = tuple[tuple[bytes, bytes], ...]

SMALL_BYTES = 20_000
PROMPT: dict[str, Any] = {"prompt": "hello", "max_tokens": 2}
GOOD_BODIES: tuple[dict[str, Any], ...] = (
    PROMPT,
    {"prompt_token_ids": [1, 2, 3], "max_tokens": 1, "temperature": 0, "seed": 7},
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stop": ["x", "yz"]},
    {**PROMPT, "logprobs": 2, "logit_bias": {"5": -1.5}, "meta": {"order": [1, {"a": None}]}},
    {**PROMPT, "min_tokens": 1, "bad_words": ["no"], "allowed_token_ids": [3, 4], "top_k": 5},
)
#: Put into the middle of a good body.
SPLINTERS = (
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"\\ud800", b"\\udfff\\ud800", b"\xed\xa0\x80",
    b"[" * 50, b"]" * 50, b'{"a":' * 40, b'"', b"\\", b"\x00", b"\xff\xfe", b",", b"null", b"true",
    b"-0", b"\xf0\x9f\x92", "é€😀".encode(), b"\r\n", b"/*", b"1E+400", b"0x10",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hostile:
    """One thing for a queue: a body under a good id for the script `enqueue`, or an entry for
    XADD."""

    body: bytes | None = None
    fields: Fields = ()

    @property
    def admissible_id(self) -> str | None:
        """Of an entry: the id under which it must end, if it has a good one and a body."""
        last = dict(self.fields)  # of a repeated field the last one counts
        name = last.get(b"id", b"").decode(errors="replace")
        good = re.fullmatch(limits.REQUEST_ID_PATTERN, name)
        return name if good and b"body" in last else None


def hostile_entries(count: int, number: int) -> Iterator[Hostile]:
    """`count` of them; `number` is the seed. The extremes come first, each both ways and all at
    once, so that memory has seen its peak by the end of the warm-up; the smaller ones come again
    between the others."""
    dice = random.Random(number)
    extremes = list(_extremes())
    bodies = _bodies(count - 2 * len(extremes), number, dice)
    for position, body in enumerate([*extremes, *extremes, *bodies]):
        kind = dice.random()
        if kind < 0.5 or position < len(extremes):
            yield Hostile(body=body)
        elif kind < 0.75 or position < 2 * len(extremes):
            yield Hostile(fields=((b"id", b"plain-%d" % position), (b"body", body)))
        else:
            yield Hostile(fields=_odd_fields(dice, position, body))


def is_valid(body: bytes) -> bool:
    """By another JSON parser than the worker's."""
    try:
        GenerateRequest.model_validate_json(body.decode(errors="replace"))
    except ValueError:
        return False
    return True


def _bodies(count: int, number: int, dice: random.Random) -> list[bytes]:
    extremes = [body for body in _extremes() if len(body) < SMALL_BYTES]
    bodies = _drawn_by_hypothesis(count // 2, number)
    bodies += [dice.choice(extremes) for _ in range(min(count // 50, 400))]
    while len(bodies) < count:
        bodies.append(_mutated(dice) if dice.random() < 0.8 else dice.randbytes(dice.randrange(99)))
    dice.shuffle(bodies)
    return bodies


# ---- by hypothesis ----

#: Halves of surrogate pairs included: JSON can write them, UTF-8 cannot.
_texts = st.text(st.characters(exclude_categories=()), max_size=8)
_numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 10**400, 1e308, 5e-324])
)
_scalars = st.none() | st.booleans() | _numbers | _texts
_json = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=6,
)
_one_field_off = st.builds(
    lambda good, name, value: {**good, name: value},
    st.sampled_from(GOOD_BODIES),
    st.sampled_from(sorted(GenerateRequest.model_fields)) | _texts,
    _json,
)
_request_shaped = st.dictionaries(
    st.sampled_from(sorted(GenerateRequest.model_fields)), _json, max_size=5
)
_any_body = (_one_field_off | _request_shaped | _json).map(lambda v: json.dumps(v).encode()) | (
    st.binary(max_size=60)
)


def _drawn_by_hypothesis(count: int, number: int) -> list[bytes]:
    found: list[bytes] = []

    @seed(number)
    @settings(
        max_examples=max(count, 1),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(body=_any_body)
    def collect(body: bytes) -> None:
        found.append(body)

    collect()
    return found[:count]


# ---- by hand ----


def _extremes() -> Iterator[bytes]:
    yield from (b"", b" ", b"null", b"[]", b"{}", b'"text"', b"0", b"\xef\xbb\xbf{}")
    yield json.dumps(PROMPT).encode("utf-16")
    yield from (b"[" * 10**5, b'{"a":' * 10**4, b"9" * 10**5, b'{"prompt":"x"' * 1000)
    yield from (_nested(depth) for depth in (limits.MAX_JSON_DEPTH - 1, limits.MAX_JSON_DEPTH, 900))
    for size in (-1, 0, 1):  # around the largest body
        frame = len(_body(prompt=""))
        yield _body(prompt="x" * (limits.MAX_BODY_BYTES - frame + size))
    yield b'{"prompt":"a","prompt":"b","max_tokens":1,"max_tokens":2}'
    yield _body(prompt=None, prompt_token_ids=[2**31])
    yield _body(prompt=None, prompt_token_ids=[1] * 60_000)
    yield _body(prompt=None, messages=[{"role": "user", "content": "x"}] * 1025)
    yield _body(prompt=None, messages=[{"role": "system", "content": "x"}])
    yield _body(prompt="x", stop=["x"] * 17)
    yield _body(prompt="x", stop=["x" * 257])
    yield _body(prompt="x", bad_words=["x"] * 257)
    yield _body(prompt="x", logit_bias={str(token): 1.0 for token in range(4097)})
    yield _body(prompt="x", seed=2**63)
    yield _body(prompt="x", min_tokens=3)
    yield _body(prompt="x", meta={"x": "y" * 4 * 1024})
    yield from (b'{"prompt":"x","max_tokens":1,"meta":{"x":%s}}' % odd for odd in _ODD_VALUES)
    for odd in _ODD_VALUES:
        yield b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,' + (
            b'"chat_template_kwargs":{"x":%s}}' % odd
        )


_ODD_VALUES = (
    b"1e999", b"-1e999", b"NaN", b"9" * 4000, b'"\\ud800"', b'"\\u0000"', b"[[[[]]]]", b"-0.0",
    b'{"\\udc00":1}', b"18446744073709551616",
)  # fmt: skip


def _body(**changes: object) -> bytes:
    given = {**PROMPT, **changes}
    return json.dumps({name: value for name, value in given.items() if value is not None}).encode()


def _nested(depth: int) -> bytes:
    """The body itself is the first level, `meta` the second."""
    inner = b"[" * (depth - 2) + b"]" * (depth - 2)
    return b'{"prompt":"x","max_tokens":1,"meta":{"x":%s}}' % inner


def _mutated(dice: random.Random) -> bytes:
    body = bytearray(json.dumps(dice.choice(GOOD_BODIES)).encode())
    for _ in range(dice.randint(1, 6)):
        where = dice.randrange(len(body) + 1)
        match dice.randrange(5):
            case 0:
                body[where : where + 1] = dice.randbytes(1)
            case 1:
                del body[where : where + dice.randint(1, 9)]
            case 2:
                body[where:where] = dice.choice(SPLINTERS)
            case 3:
                body[where:where] = body[: dice.randint(1, 20)]
            case _:
                body[where : where + 1] = b"%d" % dice.randint(-(10**20), 10**20)
    return bytes(body)


def _odd_fields(dice: random.Random, position: int, body: bytes) -> Fields:
    """Fields of an entry: missing, repeated, binary, too many, or of names that mean something."""
    good_id = b"odd-%d" % position
    ids = [good_id, good_id, b"", b"\xff\xfe\x00", b"a b", b"x" * 65, b"{x}", b"r:1", b"x\n"]
    pairs = [
        (b"id", dice.choice(ids)),
        (b"body", dice.choice([body, body, b"", b"\x00" * 40])),
        (b"tenant", dice.choice([b"default", b"acme", b"", b"a:b", b"\xff", b"x" * 65])),
        (b"deliveries", dice.choice([b"0", b"1", b"many", b"nan", b"-5", b"1e400", b""])),
        (dice.randbytes(5), dice.randbytes(30)),
        (b"state", b"done"),
        (b"", b""),
    ]
    chosen = [pair for pair in pairs if dice.random() < 0.7] or pairs[-1:]
    chosen += [dice.choice(pairs) for _ in range(dice.randrange(3))]
    dice.shuffle(chosen)
    if dice.random() < 0.05:
        chosen += [(b"f%d" % n, b"%d" % zlib.crc32(b"%d" % n)) for n in range(200)]
    return tuple(chosen)
