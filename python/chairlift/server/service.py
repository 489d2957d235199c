"""What all requests share: the engine, who may ask, who is being served, and if we still do."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from chairlift.config import Config, PolicyConfig
from chairlift.config_file import load_config, naming
from chairlift.server.body import Receive, read_body
from chairlift.server.errors import HttpError, closed, invalid, shut_down
from chairlift.server.readings import HttpCounters
from chairlift.server.settings import ServerSettings, effective_config
from chairlift.server.tenants import Caller, KeyRing, with_header
from chairlift.server.usage import UsageBook
from chairlift.server.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chairlift.async_engine import AsyncEngine


class Interruptible(Protocol):
    """A request that is being served."""

    def interrupt(self, reason: str, /) -> None:
        """Cut it short."""


class Service:
    """The state of one server."""

    def __init__(self, settings: ServerSettings, engine: AsyncEngine | None = None) -> None:
        """``engine`` may come later: until then requests are refused."""
        self.settings = settings
        self.started_at = int(time.time())
        self.usage = UsageBook()
        self.http = HttpCounters()
        self.is_draining = False
        self.live: set[Interruptible] = set()
        """Requests that came and have not been answered to the end."""
        self.is_stalled = False
        """Whether a step takes too long; the lifecycle looks."""
        self._engine = engine
        self._nobody_left: asyncio.Event | None = None
        self._use(settings.config)

    @property
    def policy(self) -> PolicyConfig:
        """The classes and tenants as they are now."""
        return self._config.policy

    @property
    def engine(self) -> AsyncEngine | None:
        """The engine, once it is loaded."""
        return self._engine

    def start(self, engine: AsyncEngine) -> None:
        """The engine is loaded: take requests."""
        self._engine = engine

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Bytes of the tokens."""
        return Vocabulary(self.open_engine().tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """``system_fingerprint``: what the same seed needs to give the same answer."""
        parts = (version("chairlift"), self.settings.model)
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    @property
    def why_closed(self) -> HttpError | None:
        """Why requests are refused now, if they are."""
        if self._engine is None:
            return closed("the model is being loaded; retry soon", code="loading")
        if self.is_draining:
            return shut_down()
        if self._engine.end_reason is not None:
            return closed("the engine has ended; the server will stop", code="engine_dead")
        if self.is_stalled:
            return closed("a step of the engine takes too long; retry later", code="engine_stalled")
        return None

    def open_engine(self) -> AsyncEngine:
        """The engine, if it takes requests.

        Raises:
            HttpError: 503.
        """
        why = self.why_closed
        if why is not None or self._engine is None:
            raise why or closed("the model is being loaded; retry soon", code="loading")
        return self._engine

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Who asks, and for which tenant.

        Raises:
            HttpError: 401; 400 for a tenant that cannot be.
        """
        caller = self._keys.caller(headers)
        return with_header(caller, self.settings.trust_tenant_header, headers)

    @property
    def has_keys(self) -> bool:
        """Whether a key is needed to ask for anything."""
        return len(self._keys) > 0

    def admin(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Who asks, if they may administrate.

        Raises:
            HttpError: 401 or 403.
        """
        caller = self._keys.caller(headers)
        if not caller.is_admin:
            raise HttpError(
                403,
                "this needs a key with admin rights: configure one ([keys.NAME] with admin = true, "
                "or --api-key) and send it",
                code="admin_required",
            )
        return caller

    async def read_body(self, receive: Receive, headers: Mapping[bytes, bytes]) -> bytes:
        """Read a body within the bounds of the settings.

        Raises:
            HttpError: 408 or 413.
            ClientGoneError: the client left before its end.
        """
        settings = self.settings
        return await read_body(
            receive,
            headers,
            most_bytes=settings.max_request_bytes,
            patience=settings.slow_reader_timeout,
        )

    def check_model(self, name: str | None) -> str:
        """The name in the answer for the name in the request.

        Raises:
            HttpError: 404.
        """
        names = self.settings.served_model_names
        if name is None:
            return names[0]
        if name not in names:
            shown = name if len(name) <= 80 else f"{name[:77]}..."
            raise HttpError(
                404,
                f"there is no model {shown!r} here; this server has {', '.join(names)}",
                code="model_not_found",
                param="model",
            )
        return name

    async def reload(self) -> list[str]:
        """Read the configuration again; returns the tenants it names.

        Raises:
            HttpError: 400, there is no file.
            ConfigError: the file cannot work, or not here; nothing has changed.
        """
        engine, source = self.open_engine(), self.settings.config_source
        if source is None:
            raise invalid(None, "the server was started without --config: there is no file to read")
        read = await asyncio.to_thread(load_config, source)
        config = effective_config(read, self.settings.queue_timeout)
        with naming(source):
            await engine.reload(config)
        self._use(config)
        return sorted(config.policy.tenants)

    def enter(self, request: Interruptible) -> None:
        """A request came."""
        self.live.add(request)

    def leave(self, request: Interruptible) -> None:
        """It was answered, or is gone."""
        self.live.discard(request)
        if not self.live and self._nobody_left is not None:
            self._nobody_left.set()

    async def wait_until_idle(self, timeout: float) -> bool:
        """Wait until nobody is served; returns whether it came to that."""
        if not self.live:
            return True
        self._nobody_left = asyncio.Event()
        try:
            await asyncio.wait_for(self._nobody_left.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def interrupt(self, requests: Iterable[Interruptible], reason: str) -> None:
        """Cut requests short."""
        for request in list(requests):
            request.interrupt(reason)

    def _use(self, config: Config) -> None:
        self._config = config
        self._keys = KeyRing(config.keys, self.settings.api_keys)
