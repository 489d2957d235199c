"""A whole server in this process: real sockets and the real engine, under a scripted executor."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import pytest
import uvloop
from running_server import LONG, RunningServer

from chairlift.async_engine import AsyncEngine
from chairlift.config import Config
from chairlift.server.lifecycle import Lifecycle, bind
from chairlift.server.settings import ServerSettings
from chairlift.testing import ScriptedExecutor


@pytest.fixture(scope="module")
def start_server():
    """Start servers that end with the module."""
    running = []

    def start(executor=None, *, config=None, settings=None, **options):
        executor = executor or ScriptedExecutor(step_time=0.0005)
        config = config or Config()
        chosen = ServerSettings(
            model="scripted", served_model_names=("test-model", "alias"), config=config
        )
        for name, value in (settings or {}).items():
            object.__setattr__(chosen, name, value)
        sock = bind("127.0.0.1", 0)
        port = sock.getsockname()[1]
        server = RunningServer(
            url=f"http://127.0.0.1:{port}",
            port=port,
            lifecycle=None,
            executor=executor,
            engine=None,
            client=httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG),
            _loop=None,
            _thread=None,
        )
        ready = threading.Event()

        def run():
            async def serve():
                server._loop = asyncio.get_running_loop()
                server.lifecycle = Lifecycle(
                    chosen,
                    lambda: AsyncEngine(
                        executor=executor,
                        config=config,
                        **{"isolation": "thread", "max_model_len": 256, **options},
                    ),
                    on_ready=on_ready,
                )
                return await server.lifecycle.run(sock)

            def on_ready(engine):
                server.engine = engine
                ready.set()

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                server.exit_code = runner.run(serve())

        server._thread = threading.Thread(target=run, daemon=True)
        server._thread.start()
        assert ready.wait(LONG)
        running.append(server)
        return server

    yield start
    for server in running:
        if isinstance(server.executor, ScriptedExecutor):
            server.executor.hold_at_steps = ()
            server.executor.release()
        server.client.close()
        if server._thread.is_alive():
            server.drain()
            server.join()


@pytest.fixture(scope="module")
def server(start_server):
    """One that most tests share."""
    return start_server()


@pytest.fixture(scope="module")
def only_this_machine():
    """A client that asks for the address of another machine fails the module's last test."""
    asked = []
    resolve = socket.getaddrinfo

    def getaddrinfo(host, *args, **options):
        if host not in ("127.0.0.1", "localhost"):
            asked.append(host)
            raise socket.gaierror(f"a test asks for {host}")
        return resolve(host, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", getaddrinfo)
        yield
    assert asked == []
