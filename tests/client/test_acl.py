"""The ACL files of deploy/redis: every role can do its work on a real server, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from click.testing import CliRunner
from redis import exceptions

from support_redis import unique_keyspace
from support_servers import Cluster, Server, single
from support_topologies import Readers, workers_of
from support_worker_process import Pool, eventually, pool_of_workers
from tokenmill import Client, ConfigurationError, RequestCancelled
from tokenmill.cli.app import tokenmill
from tokenmill.keys import Keyspace
from tokenmill.scripts import SCRIPT_NAMES, load_script

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "redis"
FILES = {"valkey-9": "users.acl", "redis-7.0": "users.acl", "redis-6.2": "users-6.2.acl"}
ROLES = ("admin", "worker", "producer", "observer", "metrics")
#: The scripts that the SDK of a producer calls; the others are for workers and operators.
SCRIPTS_OF_PRODUCERS = ("enqueue", "cancel")


def password_of(role: str) -> str:
    return f"{role}-password"


def with_passwords(text: str) -> str:
    """The file as an operator completes it."""
    for role in ROLES:
        text = re.sub(rf"^user {role} on", rf"\g<0> >{password_of(role)}", text, flags=re.M)
    return text


class Roles:
    """A server with the ACL file, a namespace of its own and a URL for each role."""

    def __init__(self, server: Server) -> None:
        self.server = server
        # The keys in the file begin with the default namespace; the pool keeps the tests apart.
        self.keys = Keyspace(pool=unique_keyspace().namespace)

    def url(self, role: str) -> str:
        return f"redis://{role}:{password_of(role)}@127.0.0.1:{self.server.port}/0"

    def connection(self, role: str) -> redis.Redis:
        return self.server.client(username=role, password=password_of(role))


@pytest.fixture(
    scope="module",
    params=["valkey-9", "redis-6.2", pytest.param("redis-7.0", marks=pytest.mark.slow)],
)
def roles(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Roles]:
    file = tmp_path_factory.mktemp("acl") / "users.acl"
    file.write_text(with_passwords((DEPLOY / FILES[request.param]).read_text()))
    with single(request.param, "--aclfile", str(file)) as server:
        yield Roles(server)


@pytest.fixture(scope="module")
def pool(roles: Roles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A worker process that is logged in as `worker`."""
    admin = SimpleNamespace(url=roles.url("admin"))
    folder = tmp_path_factory.mktemp("workers")
    with pool_of_workers(admin, roles.keys, folder) as pool:  # type: ignore[arg-type]
        pool.start_ready("one", redis_url=roles.url("worker"), lease_ms=300, heartbeat_ms=50)
        yield pool


@pytest.fixture
def client(roles: Roles) -> Iterator[Client]:
    with Client(roles.url("producer"), pool=roles.keys.pool) as client:
        yield client


def test_a_round_trip_with_every_kind_of_call(pool: Pool, client: Client, roles: Roles) -> None:
    with client.stream("hello", max_tokens=5) as stream:
        list(stream.events())
    assert client.status(stream.id).state == "done"
    assert client.result(stream.id).usage.completion_tokens == 5
    assert stream.id in str(client.explain(stream.id))
    with client.stream("hello", max_tokens=4000) as long:
        next(iter(long.events()))
        assert client.cancel(long.id)
        with pytest.raises(RequestCancelled):
            long.completion()
    queued = CliRunner().invoke(
        tokenmill,
        ["--pool", roles.keys.pool, "queue"],
        env={"TOKENMILL_REDIS_URL": roles.url("producer")},
    )
    assert (queued.exit_code, queued.stderr) == (0, "")
    with closing(roles.connection("admin")) as admin:
        first = admin.hget(roles.keys.maintenance, "last")
        eventually(lambda: admin.hget(roles.keys.maintenance, "last") != first)
    assert "ACL" not in pool.workers[0].log


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("tenant weight acme 2", 0),
        ("tenant list", 0),
        ("tenant weight acme 1", 0),
        ("dlq list", 0),
        ("dlq requeue nobody", 1),
        ("dlq show nobody", 1),
        ("dlq purge --all --yes", 0),
        ("queue pause --for-s 60", 0),
        ("queue resume", 0),
        ("queue purge --older-than-s 3600 --yes", 0),
        ("queue move --to high nobody", 1),
        ("top --once", 0),
    ],
)
def test_a_producer_may_use_the_operators_commands(
    pool: Pool, roles: Roles, command: str, status: int
) -> None:
    done = CliRunner().invoke(
        tokenmill,
        ["--pool", roles.keys.pool, *command.split()],
        env={"TOKENMILL_REDIS_URL": roles.url("producer")},
    )
    assert done.exit_code == status, done.output
    assert "permission" not in done.output


def test_an_observer_can_follow_and_nothing_else(pool: Pool, client: Client, roles: Roles) -> None:
    handle = client.submit("hello", max_tokens=5)
    with Client(roles.url("observer"), pool=roles.keys.pool) as observer:
        assert len(observer.attach(handle.id).completion().token_ids) == 5
        assert observer.status(handle.id).state == "done"
        for forbidden in (lambda: observer.submit("x"), lambda: observer.cancel(handle.id)):
            with pytest.raises(ConfigurationError, match="ACL"):
                forbidden()


def test_a_plain_producer_and_a_worker_that_drains(pool: Pool, roles: Roles) -> None:
    with closing(roles.connection("producer")) as plain:
        body = '{"prompt":"hello","max_tokens":3}'
        plain.xadd(roles.keys.ready("1"), {"id": "plain", "body": body})
    assert pool.end("plain")["st"] == "done"
    peer = pool.start_ready("peer", redis_url=roles.url("worker"))
    assert peer.terminate() == 0
    assert "peer" not in pool.ready_workers()


def test_a_worker_recovers_what_another_lost(pool: Pool, client: Client, roles: Roles) -> None:
    doomed = pool.start_ready("doomed", redis_url=roles.url("worker"), lease_ms=300, step_s=0.05)
    handles = [client.submit("hello", max_tokens=40) for _ in range(12)]
    eventually(lambda: any("doomed" in (client.status(h.id).worker or "") for h in handles))
    doomed.kill()
    assert {client.result(h.id).finish_reason for h in handles} == {"length"}


# What each role must not


def forbidden_to(roles: Roles, keys: Keyspace) -> dict[str, list[Callable[[redis.Redis], object]]]:
    log, record, queue = keys.log("x"), keys.record("x"), keys.ready("1")
    channel = keys.channel("x")
    everyone: list[Callable[[redis.Redis], object]] = [
        lambda c: c.flushall(),
        lambda c: c.flushdb(),
        lambda c: c.keys("*"),
        lambda c: c.config_get("*"),
        lambda c: c.config_set("maxmemory", 1),
        lambda c: c.acl_list(),
        lambda c: c.acl_setuser("x", enabled=True),
        lambda c: c.execute_command("DEBUG", "SLEEP", "0"),
        lambda c: c.execute_command("REPLICAOF", "127.0.0.1", "1"),
        lambda c: c.execute_command("CLIENT", "KILL", "TYPE", "normal"),
        lambda c: c.execute_command("CLIENT", "LIST"),
        lambda c: c.execute_command("MONITOR"),
        lambda c: c.execute_command("MODULE", "LIST"),
        lambda c: c.execute_command("SHUTDOWN", "NOSAVE"),
        lambda c: c.execute_command("PSUBSCRIBE", "*"),
        lambda c: c.restore("tokenmill:x", 0, b"\x00"),
        lambda c: c.script_flush(),
        lambda c: c.hget("other", "field"),
        lambda c: c.slowlog_get(),
    ]
    writers: list[Callable[[redis.Redis], object]] = [
        lambda c: c.hset("other", "field", "1"),
        lambda c: c.eval("return redis.call('HSET', 'other', 'a', '1')", 0),
        lambda c: c.eval("return redis.call('CONFIG', 'GET', '*')", 0),
        lambda c: c.publish("other", "x"),
        lambda c: c.set("other", "1"),
    ]
    readers: list[Callable[[redis.Redis], object]] = [
        lambda c: c.hset(record, "state", "done"),
        lambda c: c.xadd(log, {"d": "{}"}),
        lambda c: c.publish(channel, "x"),
        lambda c: c.eval("return 1", 0),
        lambda c: c.xreadgroup("tokenmill", "w", {queue: ">"}),
        lambda c: c.hgetall(keys.owners),
        lambda c: c.delete(log),
    ]
    return {
        "worker": [*everyone, *writers],
        "producer": [
            *everyone,
            *writers,
            lambda c: c.xreadgroup("tokenmill", "w", {queue: ">"}),
            lambda c: c.execute_command("SUBSCRIBE", f"{keys.prefix}q:1"),
        ],
        "observer": [
            *everyone,
            *readers,
            lambda c: c.hgetall(keys.counters),
            lambda c: c.xrange(queue),
        ],
        "metrics": [
            *everyone,
            *readers,
            lambda c: c.xrange(log),
            lambda c: c.hgetall(record),
            lambda c: c.hmget(record, "body"),
            lambda c: c.execute_command("SUBSCRIBE", channel),
        ],
    }


def is_refused(attempt: Callable[[redis.Redis], object], connection: redis.Redis) -> bool:
    try:
        attempt(connection)
    except exceptions.NoPermissionError:
        return True
    except exceptions.ResponseError as error:  # inside a script, the class is lost
        return (
            re.search(r"not allowed|ACL failure|executing the script can't", str(error)) is not None
        )
    return False


@pytest.mark.parametrize("role", [role for role in ROLES if role != "admin"])
def test_what_a_role_must_not_do_is_refused(roles: Roles, role: str) -> None:
    with closing(roles.connection(role)) as connection:
        allowed = [
            number
            for number, attempt in enumerate(forbidden_to(roles, roles.keys)[role])
            if not is_refused(attempt, connection)
        ]
    assert allowed == []


def test_metrics_may_count(roles: Roles) -> None:
    keys = roles.keys
    with closing(roles.connection("metrics")) as connection:
        connection.hgetall(keys.counters)
        connection.xlen(keys.ready("1"))
        connection.zcard(keys.delayed)
        connection.xlen(keys.dead_letters)
        assert connection.info("memory")


def gets_in(server: Server, user: str, password: str) -> bool:
    with closing(server.client(username=user, password=password)) as guesser:
        try:
            return bool(guesser.ping())
        except exceptions.AuthenticationError:
            return False


def test_nobody_gets_in_without_a_name_and_a_password(roles: Roles) -> None:
    with closing(roles.server.client()) as stranger, pytest.raises(exceptions.AuthenticationError):
        stranger.ping()
    for role in ROLES:
        assert not gets_in(roles.server, role, "guess")


def test_the_files_as_shipped_let_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "users.acl"
    file.write_text((DEPLOY / "users.acl").read_text())
    with single("valkey-9", "--aclfile", str(file)) as server:
        for role in (*ROLES, "default"):
            for password in ("", role, "password", "tokenmill"):
                assert not gets_in(server, role, password)


@pytest.mark.parametrize("release", sorted(FILES))
def test_every_release_takes_the_configuration(release: str) -> None:
    with single(release) as plain, closing(plain.client()) as client:
        defaults = client.config_get("*")
    config = Server(plain.binary, lambda port: (str(DEPLOY / "redis.conf"), "--port", str(port)))
    with config as server, closing(server.client()) as client:
        found = client.config_get("*")
    assert found["maxmemory-policy"] == "noeviction"
    assert found["appendonly"] == "yes"
    assert found.keys() == defaults.keys()


# A script must not use what its caller's role lacks


def commands_of(name: str) -> set[str]:
    """Every Redis command in the text of a script and its prelude, as ACLs name them."""
    source = re.sub(r"--.*", "", load_script(name).source)
    literal = re.findall(r"call\(\s*'([A-Z]+)'(?:,\s*'([A-Z]+)')?", source)
    listed = re.findall(r"\{ '(X[A-Z]+)',", source)  # heartbeat builds its command in a table
    found = {(command, "") for command in listed}
    for command, second in literal:
        found.add((command, second if command in {"XGROUP", "XINFO"} else ""))
    if "publish" in source:
        found |= {("PUBLISH", ""), ("SPUBLISH", "")}
    return {"|".join(filter(None, pair)).lower() for pair in found}


def rights(file: str, role: str) -> set[str]:
    (line,) = re.findall(rf"^user {role} .*$", (DEPLOY / file).read_text(), re.M)
    return {word[1:] for word in line.split() if word.startswith("+")}


@pytest.mark.parametrize("file", sorted(set(FILES.values())))
@pytest.mark.parametrize("role", ["worker", "producer"])
def test_no_script_uses_a_command_that_its_role_lacks(file: str, role: str) -> None:
    scripts = SCRIPT_NAMES if role == "worker" else SCRIPTS_OF_PRODUCERS
    missing = {name: commands_of(name) - rights(file, role) for name in scripts}
    if "6.2" in file:  # sharded Pub/Sub came with Redis 7
        missing = {name: commands - {"spublish"} for name, commands in missing.items()}
    assert {name: commands for name, commands in missing.items() if commands} == {}


def test_the_reader_of_scripts_sees_their_commands() -> None:
    assert {"xclaim", "hget", "xlen"} <= commands_of("heartbeat")
    assert {"xgroup|delconsumer", "xpending", "hset", "spublish"} <= commands_of("tick")


def test_the_hardened_profile_runs_loaded_scripts_only(tmp_path: Path) -> None:
    file = tmp_path / "users.acl"
    file.write_text(with_passwords((DEPLOY / "users.acl").read_text()).replace(" +eval ", " "))
    with single("valkey-9", "--aclfile", str(file)) as server:
        roles = Roles(server)
        with Client(roles.url("producer"), pool=roles.keys.pool) as client:
            with pytest.raises(ConfigurationError, match="ACL"):
                client.submit("x")
            with closing(roles.connection("admin")) as admin:
                for name in SCRIPT_NAMES:
                    admin.script_load(load_script(name).source)
            assert client.cancel(client.submit("x").id)


@pytest.mark.slow
def test_the_roles_in_a_cluster(tmp_path: Path) -> None:
    keys = Keyspace(pool=unique_keyspace().namespace)
    with Cluster("redis-7.0") as cluster:
        for node in cluster.nodes:
            with closing(node.client()) as admin:
                for role in ("worker", "producer"):
                    (line,) = re.findall(
                        rf"^user {role} (.*)$", (DEPLOY / "users.acl").read_text(), re.M
                    )
                    rules = (*line.split(), f">{password_of(role)}")
                    admin.execute_command("ACL", "SETUSER", role, *rules)
        urls = {
            role: cluster.url.replace("://", f"://{role}:{password_of(role)}@")
            for role in ("worker", "producer")
        }
        with (
            workers_of(urls["worker"], keys.pool, tmp_path) as workers,
            Client(urls["producer"], pool=keys.pool) as client,
        ):
            workers.start("one", partitions=3)
            readers = Readers(client)
            readers.read([f"r-{number}" for number in range(9)], num_tokens=20)
            readers.finish()
            assert workers.processes[0].terminate() == 0
