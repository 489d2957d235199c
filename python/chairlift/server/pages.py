"""What the server shows of itself: ``/`` (the live page), ``/live`` (its data), ``/metrics``.

The page is one document: style and script are written into it once, and the policy that is sent
along allows exactly these two and nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files

from fastapi import APIRouter, Response
from fastapi.params import Depends

from chairlift.errors import EngineDeadError
from chairlift.server.errors import HttpError, answer_of, closed
from chairlift.server.live import Engine, Pulse
from chairlift.server.metrics import CONTENT_TYPE, render
from chairlift.server.readings import HttpCounters, ShownTenants, Snapshot


@dataclass(frozen=True, slots=True)
class Page:
    """The live page, and the policy that lets a browser show it."""

    body: bytes
    policy: str


@cache
def live_page() -> Page:
    """Put the page together."""
    folder = files("chairlift.server")
    page, style, script = (
        folder.joinpath(f"live.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    body = page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return Page(body.encode(), policy)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def router(
    engine: Callable[[], Engine | None],
    *,
    model_name: str = "",
    http: HttpCounters | None = None,
    dependencies: Sequence[Depends] = (),
) -> APIRouter:
    """Make the routes.

    ``engine`` returns the engine, or None while there is none. ``dependencies`` are asked before
    the data (``/live`` and ``/metrics``) is given: it names tenants.
    """
    routes = APIRouter(include_in_schema=False)
    pulse = Pulse(engine, model_name)
    shown = ShownTenants()
    release = version("chairlift")

    @routes.get("/")
    async def page() -> Response:
        """Show the live page."""
        live = live_page()
        headers = {
            "Content-Security-Policy": live.policy,
            "Cache-Control": "no-cache",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return Response(live.body, media_type="text/html; charset=utf-8", headers=headers)

    @routes.get("/live", dependencies=dependencies)
    async def live() -> Response:
        """Tell the page what to show."""
        try:
            told = await answer_of(pulse.look())
        except HttpError as error:
            return _unavailable(error)
        except EngineDeadError:
            return _unavailable(closed("the engine has ended", code="engine_dead"))
        if told is None:
            return _unavailable(closed("the model is being loaded", code="loading"))
        return Response(told, media_type="application/json", headers={"Cache-Control": "no-store"})

    @routes.get("/metrics", dependencies=dependencies)
    async def metrics() -> Response:
        """Tell Prometheus."""
        current = engine()
        try:
            groups = None if current is None else await answer_of(current.group_metrics())
        except (EngineDeadError, HttpError):
            groups = None
        names = () if groups is None else shown.update(groups)
        snapshot = Snapshot(groups, model_name, names, http, release)
        # Some milliseconds of work, which no stream is to wait for.
        text = await asyncio.to_thread(render, snapshot)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    return routes


def _unavailable(error: HttpError) -> Response:
    headers = {**error.headers, "Cache-Control": "no-store"}
    return Response(error.body(), error.status, media_type="application/json", headers=headers)
