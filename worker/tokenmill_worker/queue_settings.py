"""The options that say which queue a worker works for, and how it gets there."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings

from tokenmill._redis import RedisOptions
from tokenmill._url import RedisUrl
from tokenmill.errors import ConfigurationError
from tokenmill.keys import MAX_PARTITIONS, Keyspace

#: Calls on the control connection must fail well before a lease does.
CONTROL_TIMEOUT_S = 2.0


class QueueSettings(BaseSettings):
    """Part of `Settings`."""

    redis_url: SecretStr = Field(
        SecretStr("redis://localhost:6379/0"),
        description="Redis to work for; rediss:// for TLS, redis+sentinel:// and redis+cluster:// "
        "for several servers. REDIS_URL is read as well.",
    )
    redis_url_file: Path | None = Field(
        None, description="File that holds that URL with all its secrets, instead of the URL."
    )
    redis_password_file: Path | None = Field(
        None, description="File that holds the Redis password, instead of one in the URL."
    )
    redis_ca_file: Path | None = Field(
        None, description="Certificates to trust with rediss://, instead of the system's."
    )
    insecure_redis: bool = Field(False, description="Talk to a public host without verified TLS.")
    namespace: str = Field("tokenmill", description="First part of every key.")
    pool: str = Field("default", description="Workers of a pool serve the same model.")
    partitions: int | None = Field(
        None,
        ge=1,
        le=MAX_PARTITIONS,
        description="Parts into which a new pool is divided, for ever; unset: 1, or what it has.",
    )
    serve_partitions: str | None = Field(
        None, description="Those that this worker serves, as in 0,2; all if unset."
    )
    name: str = Field(
        platform.node() or "worker",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="First part of the worker's id; the rest makes it unique.",
    )
    socket_timeout_s: float = Field(
        5.0, gt=0, le=60, description="A Redis call without a reply for so long has failed."
    )
    connect_timeout_s: float = Field(2.0, gt=0, le=60, description="The same for connecting.")

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, url: SecretStr) -> SecretStr:
        try:
            RedisUrl.parse(url.get_secret_value())
        except ConfigurationError as error:
            raise ValueError(str(error).removeprefix("Redis URL: ").removeprefix("it ")) from None
        return url

    @field_validator("redis_url_file", "redis_password_file", "redis_ca_file")
    @classmethod
    def _is_readable(cls, file: Path | None) -> Path | None:
        if file is not None and not os.access(file, os.R_OK):
            raise ValueError("cannot be read")
        return file

    @model_validator(mode="after")
    def _has_one_url(self) -> Self:
        if self.redis_url_file is not None and "redis_url" in self.model_fields_set:
            raise ValueError("redis_url_file: give it or redis_url, not both")
        return self

    @field_validator("serve_partitions")
    @classmethod
    def _are_numbers(cls, numbers: str | None) -> str | None:
        if numbers is not None and not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise ValueError("must be numbers with commas between them")
        return numbers

    def served_partitions(self, count: int) -> list[int]:
        """Of the pool's `count` partitions; raises `ConfigurationError` for one that is not."""
        if self.serve_partitions is None:
            return list(range(count))
        served = sorted(set(map(int, self.serve_partitions.split(","))))
        if served[-1] >= count:
            raise ConfigurationError(
                f"serve_partitions: the pool has {count}, so the highest is {count - 1}"
            )
        return served

    @property
    def keyspace(self) -> Keyspace:
        return Keyspace(self.namespace, self.pool)

    def redis_url_with_password(self) -> str:
        """The URL to connect to; the password file, if any, wins over the URL's own."""
        url = self.redis_url.get_secret_value()
        if self.redis_url_file is not None:
            url = self.redis_url_file.read_text().strip()
        if self.redis_password_file is None:
            return url
        password = quote(self.redis_password_file.read_text().strip(), safe="")
        parts = urlsplit(url)
        user = parts.username or ""
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{user}:{password}@{host}"))

    def redis_options(self, client_name: str, *, for_control: bool = False) -> RedisOptions:
        """How to connect; `for_control`: for calls that must fail well before a lease does."""
        timeout_s = self.socket_timeout_s
        return RedisOptions(
            socket_timeout_s=min(timeout_s, CONTROL_TIMEOUT_S) if for_control else timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            client_name=client_name,
            ca_file=None if self.redis_ca_file is None else str(self.redis_ca_file),
            insecure=self.insecure_redis,
        )
