"""From a bound socket to an exit code: load, serve, drain, reload, notice that the engine ended.

Signals: SIGTERM and SIGINT drain. New requests are refused at once while those that are there go
on, until none is left or the grace time is over; then each gets its end, and the exit code is 0. A
second one exits now. SIGHUP reads the configuration again. If the engine ends by itself, every
stream gets its error, and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from chairlift.errors import ChairliftError, ConfigError
from chairlift.server.app import create_app
from chairlift.server.connection import Connection
from chairlift.server.errors import HttpError
from chairlift.server.exchange import SHUT_DOWN
from chairlift.server.settings import ServerSettings

if TYPE_CHECKING:
    from chairlift.async_engine import AsyncEngine
    from chairlift.server.service import Service

logger = logging.getLogger("chairlift.server")

_LOOK_EVERY_S = 0.25
"""How often it is looked whether the engine still runs."""
_LAST_WORDS_S = 1.0
"""How long requests that were cut short may take to tell their clients."""
_KEEP_ALIVE_S = 65
"""How long an idle connection is kept: longer than clients and proxies keep theirs."""
_BACKLOG = 4_096


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: it ends when it is told to."""

    def __init__(
        self, app: Callable[..., object], *, root_path: str = "", log_level: str = "warning"
    ) -> None:
        """Serve ``app``."""
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=log_level,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                root_path=root_path,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                backlog=_BACKLOG,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the lifecycle."""
        yield


class Lifecycle:
    """One run of the server."""

    def __init__(
        self,
        settings: ServerSettings,
        make_engine: Callable[[], AsyncEngine],
        *,
        on_ready: Callable[[AsyncEngine], None],
        log_level: str = "warning",
    ) -> None:
        """``make_engine`` loads the model, on a thread."""
        app = create_app(None, settings)
        self.service: Service = app.state.service
        self._settings = settings
        self._make_engine = make_engine
        self._on_ready = on_ready
        self._http = HttpServer(app, log_level=log_level)
        self._should_drain = asyncio.Event()
        self._reloads: set[asyncio.Task[None]] = set()

    async def run(self, sock: socket.socket) -> int:
        """Serve on a bound socket until the end; returns the exit code.

        Raises:
            ChairliftError: the engine cannot start.
        """
        self._handle_signals()
        serving = asyncio.create_task(self._http.serve(sockets=[sock]))
        watching = asyncio.create_task(self.service.http.loop_lag.watch())
        try:
            engine = await self._load()
            if engine is None:
                return 0
            try:
                self.service.start(engine)
                self._on_ready(engine)
                code = await self._serve(engine)
                await self._stop_http(serving)
                return code
            finally:
                await engine.shutdown()
        finally:
            watching.cancel()
            await self._stop_http(serving)

    async def _serve(self, engine: AsyncEngine) -> int:
        """Wait for the reason to end; see that clients get their ends."""
        watching = asyncio.create_task(self._watch(engine))
        draining = asyncio.create_task(self._should_drain.wait())
        await asyncio.wait((watching, draining), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        if watching.done():
            logger.critical("the engine has ended: %s", engine.end_reason)
            await self.service.wait_until_idle(_LAST_WORDS_S)
            self.service.interrupt(self.service.live, SHUT_DOWN)
            return 1
        code = await self._drain(watching)
        watching.cancel()
        return code

    async def _drain(self, watching: asyncio.Task[None]) -> int:
        service, grace = self.service, self._settings.shutdown_grace
        service.is_draining = True
        logger.info(
            "draining: %d requests have up to %g s; a second signal exits now",
            len(service.live),
            grace,
        )
        idle = asyncio.create_task(service.wait_until_idle(grace))
        await asyncio.wait((idle, watching), return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if service.live:
            logger.warning("%d requests are cut short", len(service.live))
            service.interrupt(service.live, SHUT_DOWN)
            await service.wait_until_idle(_LAST_WORDS_S)
        return 1 if watching.done() else 0

    async def _watch(self, engine: AsyncEngine) -> None:
        """Return when the engine ends; meanwhile see whether its steps end."""
        limit = self._settings.stall_timeout
        while engine.end_reason is None:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                metrics = await asyncio.wait_for(engine.metrics(), limit)
                self.service.is_stalled = metrics["in_flight_us"] > limit * 1e6
            except TimeoutError:
                self.service.is_stalled = True
            except ChairliftError:
                continue  # it has ended

    async def _load(self) -> AsyncEngine | None:
        """Load the engine on a thread that does not keep the process; None: a signal came first."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[AsyncEngine] = loop.create_future()

        def tell(engine: AsyncEngine | None, error: BaseException | None) -> None:
            if loaded.done():
                return
            if engine is not None:
                loaded.set_result(engine)
            elif error is not None:
                loaded.set_exception(error)

        def load() -> None:
            engine, failure = None, None
            try:
                engine = self._make_engine()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(tell, engine, failure)

        threading.Thread(target=load, name="chairlift-load", daemon=True).start()
        signalled = asyncio.create_task(self._should_drain.wait())
        await asyncio.wait((loaded, signalled), return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if loaded.done():
            return loaded.result()
        loaded.cancel()
        return None

    async def _stop_http(self, serving: asyncio.Task[None]) -> None:
        self._http.should_exit = True
        await serving

    def _handle_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)

    def drain(self) -> None:
        """Begin to drain; idempotent, on the event loop."""
        self._should_drain.set()

    def _end(self, number: int) -> None:
        if self._should_drain.is_set():
            os._exit(128 + number)
        self.drain()

    def _hang_up(self) -> None:
        task = asyncio.get_running_loop().create_task(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self) -> None:
        try:
            await self.service.reload()
        except HttpError as error:
            logger.error("nothing is reloaded: %s", error.message)
        except (ConfigError, ChairliftError) as error:
            logger.error("nothing is reloaded: %s", error)
        else:
            logger.info("the configuration is reloaded")


def bind(host: str, port: int) -> socket.socket:
    """Bind and listen, so that what is wrong with the address is known before a model is loaded.

    Raises:
        ConfigError: says why it cannot be.
    """
    try:
        if not 0 <= port < 2**16:
            raise OverflowError("a port is from 0 to 65535")
        family, kind, number, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, number)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {why.lower()}; choose another --host or --port"
        ) from None
    return sock
