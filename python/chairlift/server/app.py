"""The routes. What they do is elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from chairlift.errors import ChairliftError
from chairlift.server import pages
from chairlift.server.body import (
    INLINE_BYTES,
    ClientGoneError,
    parse_body,
    unless,
    until_gone,
)
from chairlift.server.chat import answer_chat
from chairlift.server.completions import answer_completion
from chairlift.server.errors import HttpError, answer_of, as_http, shut_down
from chairlift.server.exchange import Exchange, write_long
from chairlift.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    read_request,
)
from chairlift.server.service import Service
from chairlift.server.settings import ServerSettings
from chairlift.server.tokenizing import detokenize, tokenize

if TYPE_CHECKING:
    from chairlift.async_engine import AsyncEngine

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def create_app(engine: AsyncEngine | None, settings: ServerSettings) -> FastAPI:
    """Make the application; without an engine it refuses requests until ``service.start``.

    ``app.state.service`` is the :class:`Service` that all routes share.
    """
    service = Service(settings, engine)
    app = FastAPI(
        title="Chairlift",
        version=version("chairlift"),
        root_path=settings.root_path,
        docs_url="/docs" if settings.serve_docs else None,
        openapi_url="/openapi.json" if settings.serve_docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(HttpError, _http_error)
    app.add_exception_handler(ChairliftError, _http_error)
    app.add_exception_handler(Exception, _http_error)
    app.include_router(_generation(service))
    app.include_router(_text(service))
    app.include_router(_probes(service))
    app.include_router(_admin(service))
    app.include_router(_pages(service))
    return app


def _generation(service: Service) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", summary="Answer a chat")
    async def chat_completions() -> Response:
        return Exchange(service, ChatRequest, answer_chat)

    @router.post("/v1/completions", summary="Continue prompts")
    async def completions() -> Response:
        return Exchange(service, CompletionRequest, answer_completion)

    return router


def _text(service: Service) -> APIRouter:
    router = APIRouter(tags=["models and tokens"])

    @router.get("/v1/models", summary="The models")
    async def models(request: Request) -> Response:
        service.caller(_headers(request))
        names = service.settings.served_model_names
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in names]})

    @router.get("/v1/models/{name:path}", summary="One model")
    async def model(request: Request, name: str) -> Response:
        service.caller(_headers(request))
        return JSONResponse(_model(service, service.check_model(name)))

    @router.post("/tokenize", summary="Token ids of a text or a chat")
    async def tokens(request: Request) -> Response:
        return await _answer(service, request, TokenizeRequest, tokenize)

    @router.post("/detokenize", summary="Text of token ids")
    async def text(request: Request) -> Response:
        return await _answer(service, request, DetokenizeRequest, detokenize)

    return router


def _probes(service: Service) -> APIRouter:
    router = APIRouter(tags=["probes"])

    @router.get("/health", summary="200 while the engine moves, or has nothing to do")
    async def health() -> Response:
        engine = service.engine
        if engine is not None and engine.end_reason is not None:
            return _probe(503, "the engine has ended")
        if service.is_stalled:
            return _probe(503, "a step takes too long")
        return _probe(200, "ok")

    @router.get("/ready", summary="200 while requests are taken")
    async def ready() -> Response:
        why = service.why_closed
        return _probe(200, "ok") if why is None else _probe(503, why.message, why.headers)

    @router.get("/version", summary="The version")
    async def version_() -> Response:
        return JSONResponse({"version": version("chairlift")})

    @router.get("/load", summary="Requests that are being served")
    async def load(request: Request) -> Response:
        service.caller(_headers(request))
        return JSONResponse({"server_load": len(service.live)})

    return router


def _admin(service: Service) -> APIRouter:
    router = APIRouter(prefix="/admin", tags=["administration"])

    @router.post("/reload", summary="Read the configuration again")
    async def reload(request: Request) -> Response:
        service.admin(_headers(request))
        # An engine that is stopped takes it up later: what it does then, so does the server.
        tenants = await answer_of(asyncio.shield(asyncio.ensure_future(service.reload())))
        return JSONResponse({"status": "reloaded", "tenants": tenants})

    @router.get("/usage", summary="What each tenant has used")
    async def usage(request: Request) -> Response:
        service.admin(_headers(request))
        groups = await answer_of(service.open_engine().group_metrics(brief=True))
        return JSONResponse(
            {"since": service.started_at, "tenants": service.usage.report(groups["tenants"])}
        )

    return router


def _pages(service: Service) -> APIRouter:
    def check(request: Request) -> None:
        """They name tenants: where there are keys, one with admin rights is needed."""
        if service.has_keys:
            service.admin(_headers(request))

    return pages.router(
        lambda: service.engine,
        model_name=service.settings.served_model_names[0],
        http=service.http,
        dependencies=[Depends(check)],
    )


async def _answer(
    service: Service,
    request: Request,
    kind: type[Any],
    answer: Callable[[Service, Any], Awaitable[dict[str, object]]],
) -> Response:
    """A short exchange: nothing of it reaches the scheduler."""
    headers = _headers(request)
    service.caller(headers)
    service.open_engine()

    async def serve() -> Response:
        body = await service.read_body(request.receive, headers)
        return await unless(until_gone(request.receive), _answer_to(service, body, kind, answer))

    shutdown = _Shutdown()
    service.enter(shutdown)
    try:
        return await unless(shutdown.comes, serve())
    except ClientGoneError:
        return Response(status_code=499)
    except (ChairliftError, HttpError) as error:
        return _error_response(as_http(error, prompt_field=kind.prompt_field, renames={}))
    finally:
        service.leave(shutdown)


class _Shutdown:
    """What cuts a short exchange short."""

    def __init__(self) -> None:
        self.comes: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def interrupt(self, _reason: str) -> None:
        if not self.comes.done():
            self.comes.set_exception(shut_down())


async def _answer_to(
    service: Service,
    body: bytes,
    kind: type[Any],
    answer: Callable[[Service, Any], Awaitable[dict[str, object]]],
) -> Response:
    parsed = await parse_body(body, lambda data: read_request(kind, data))
    service.check_model(parsed.model)
    content = await answer(service, parsed)
    if len(body) <= INLINE_BYTES:
        return JSONResponse(content)
    written = await asyncio.to_thread(write_long, content)
    return Response(written, media_type="application/json")


def _model(service: Service, name: str) -> dict[str, object]:
    engine = service.engine
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "chairlift",
        "root": service.settings.model,
        "parent": None,
        "max_model_len": None if engine is None else engine.limits["max_model_len"],
    }


def _headers(request: Request) -> dict[bytes, bytes]:
    return dict(request.scope["headers"])


def _probe(status: int, says: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"status": says}, status, headers)


def _error_response(error: HttpError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _http_error(_request: Request, error: Exception) -> Response:
    if isinstance(error, asyncio.CancelledError):
        raise error
    return _error_response(as_http(error, prompt_field="prompt", renames={}))


async def _http_exception(request: Request, error: Exception) -> Response:
    """What the router refuses: no such path, or no such method of it."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    method, path = request.method, request.url.path
    path = path if len(path) <= 80 else f"{path[:77]}..."
    message, code = {
        404: (f"there is no {path} here", "not_found"),
        405: (f"{path} does not take {method}", "method_not_allowed"),
    }.get(status, ("the request cannot be served", None))
    headers = getattr(error, "headers", None)
    return _error_response(HttpError(status, message, code=code, headers=headers))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the bodies that we read ourselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        reference = "#/components/schemas/{model}"
        models: list[tuple[type[BaseModel], Literal["validation"]]] = [
            (model, "validation") for model in _BODIES.values()
        ]
        _, definitions = models_json_schema(models, ref_template=reference)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path, model in _BODIES.items():
            schema["paths"][path]["post"]["requestBody"] = {
                "required": True,
                "content": {
                    "application/json": {"schema": {"$ref": reference.format(model=model.__name__)}}
                },
            }
        app.openapi_schema = schema
    return app.openapi_schema
