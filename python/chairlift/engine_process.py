"""An engine in a process of its own: how it is started, greeted and ended.

The forward pass and a busy event loop must not share an interpreter: on two cores a step of 63 ms
takes 128 ms beside a thread that runs Python half of the time. So the client's process starts the
engine's, which inherits one end of a socket pair: no path in the file system, nobody else can
connect, and whoever dies is noticed by the other. Two pickled messages go over it (the arguments
there; a tokenizer or an error back), then it belongs to the Rust threads of
``rust/python/src/link.rs``.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from chairlift import _core
from chairlift.engine import Engine, LocalEngine
from chairlift.engine_args import EngineArgs
from chairlift.errors import ChairliftError, ConfigError, EngineDeadError

logger = logging.getLogger("chairlift")

_JOIN_TIMEOUT_S = 15.0
"""How long the process may take to end: its own patience with a step, and a bit."""
_EXIT_TIMEOUT_S = 0.5
"""How long it may take to be gone when its line is closed."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class _Order:
    """What the process is started with."""

    path: list[str]
    """``sys.path``, so that it finds what the client finds."""
    log_level: int
    args: bytes
    """Pickled :class:`EngineArgs`: by itself, since unpickling it may fail."""


class ProcessEngine(Engine):
    """An engine that runs in a process that it starts, and that ends with it."""

    def __init__(self, args: EngineArgs) -> None:
        """Start the process and wait until it has loaded the model.

        Raises:
            ConfigError: the settings cannot work, or cannot go to another process.
            ModelError: the model cannot be loaded.
            EngineDeadError: the process ended before it was ready.
        """
        super().__init__(args)
        order = _Order(sys.path, logging.getLogger("chairlift").getEffectiveLevel(), _pickled(args))
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                command = [sys.executable, "-m", "chairlift.engine_process", str(theirs.fileno())]
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": _package_path()},
                )
            try:
                _send(ours, order)
                answer = _receive(ours)
                if answer is None:
                    raise EngineDeadError(
                        f"the engine's process ended before it was ready{self._exit}"
                    )
                if isinstance(answer, BaseException):
                    raise answer
                self.tokenizer = answer
                self.client = _core.EngineClient.connect(ours.detach())
            except BaseException:
                self._process.kill()
                self._process.wait()
                raise
        self._finalizer = weakref.finalize(self, _stop, self.client, self._process)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def end_reason(self) -> str | None:
        """Why the engine has ended, and how its process did; None while it runs."""
        reason = self.client.end_reason
        if reason is None or not self.client.is_closed:
            return reason
        return reason + self._exit

    def shutdown(self) -> None:
        """End live requests as aborted, and the process; idempotent, from any thread."""
        self._finalizer()

    @cached_property
    def _exit(self) -> str:
        """How the process ended, which it does as soon as its line is closed."""
        try:
            status = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" (exit status {status})" if status >= 0 else f" ({signal.Signals(-status).name})"


def _package_path() -> str:
    """``PYTHONPATH`` with which ``-m`` finds this package; the rest is in the order."""
    here = str(Path(__file__).parents[1])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))


def _stop(client: _core.EngineClient, process: subprocess.Popen[bytes]) -> None:
    client.shutdown()
    try:
        process.wait(_JOIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.warning("the engine's process has not ended for %.0f s; killed", _JOIN_TIMEOUT_S)
        process.kill()
        process.wait()


def _pickled(args: EngineArgs) -> bytes:
    for name in ("executor", "tokenizer"):
        value = getattr(args, name)
        try:
            if type(value).__module__ == "__main__":
                raise TypeError("its class is of the main program, which is not run again")
            pickle.dumps(value)
        except Exception as error:  # whatever a class of the user raises
            raise ConfigError(
                f"{name} cannot go to the engine's process: {error}; name it as module:Class or a "
                "directory, or use isolation='thread'"
            ) from error
    return pickle.dumps(args)


def _send(end: socket.socket, value: object) -> None:
    content = pickle.dumps(value)
    end.sendall(_LENGTH.pack(len(content)) + content)


def _receive(end: socket.socket) -> Any:  # noqa: ANN401  # a message, or None at the end
    header = _read(end, _LENGTH.size)
    if header is None:
        return None
    content = _read(end, _LENGTH.unpack(header)[0])
    return None if content is None else pickle.loads(content)


def _read(end: socket.socket, count: int) -> bytes | None:
    """Read so many bytes and not one more: what follows is somebody else's."""
    parts = bytearray()
    while len(parts) < count:
        part = end.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _load(order: _Order) -> LocalEngine:
    try:
        args = pickle.loads(order.args)
    except Exception as error:  # whatever a class of the user raises
        raise ConfigError(
            f"the engine's process cannot read its arguments: {error}; name executor and tokenizer "
            "as module:Class or a directory, or use isolation='thread'"
        ) from error
    return LocalEngine(args)


def _telling(error: BaseException) -> BaseException:
    """The error, or one like it that can be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class raises
        return ChairliftError(f"{type(error).__name__}: {error}")
    return error


def _watch(end: socket.socket, is_loaded: threading.Event) -> None:
    """End a process that is still loading when its client is gone; then the link notices."""
    gone = not end.recv(1, socket.MSG_PEEK)
    if gone and not is_loaded.is_set():
        os._exit(1)


def main(descriptor: int) -> int:
    """Be the engine of the client at the other end of a socket, until that is gone."""
    # A signal to the whole group is the client's to answer: the engine goes on as long as it does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=descriptor)
    order = _receive(end)
    if order is None:
        return 1
    is_loaded = threading.Event()
    threading.Thread(target=_watch, args=(end, is_loaded), daemon=True).start()
    sys.path[:] = order.path
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("chairlift").setLevel(order.log_level)
    try:
        engine = _load(order)
        answer: object = engine.tokenizer
        try:
            pickle.dumps(answer)
        except Exception as error:  # whatever a class of the user raises
            raise ConfigError(
                f"the tokenizer cannot go to another process: {error}; use isolation='thread'"
            ) from error
    except BaseException as error:
        _send(end, _telling(error))
        return 1
    is_loaded.set()
    _send(end, answer)
    engine.core.serve(end.detach())
    engine.shutdown()
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    logging.shutdown()
    os._exit(status)  # a step that never returns must not keep the process
