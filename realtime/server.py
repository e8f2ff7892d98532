"""The ASGI application: the `/v1/realtime` socket, voices, health, readiness and metrics."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from realtime.config import ServerConfig
from realtime.connection import INTERNAL_ERROR
from realtime.errors import HTTP_STATUS, CapacityError, PlosiveError
from realtime.hub import Hub, State
from realtime.metrics import CONTENT_TYPE, Metrics
from realtime.page_routes import page_router
from realtime.pingpong.api import Engine
from realtime.voice_routes import VoiceRoutes
from realtime.voices import VoiceStore
from realtime.wire import PATH, SUBPROTOCOL


def create_app(engine: Engine, config: ServerConfig, voices: VoiceStore) -> FastAPI:
    """Everything that the server answers. The engine is started and stopped with the app.

    `app.state.hub` is the `Hub`: whoever runs the app drains it before shutting the app down.
    """
    metrics = Metrics()
    hub = Hub(engine, config, voices, metrics)
    voice_routes = VoiceRoutes(engine, config, voices)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        hub.start()
        try:
            yield
        finally:
            voice_routes.close()
            await hub.stop()

    app = FastAPI(title="Plosive", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.hub = hub
    app.include_router(voice_routes.router)
    app.include_router(page_router())
    _add_realtime(app, hub)
    _add_operations(app, hub, metrics)
    _add_error_handlers(app)
    return app


def _add_realtime(app: FastAPI, hub: Hub) -> None:
    @app.websocket(PATH)
    async def realtime(websocket: WebSocket) -> None:
        try:
            slot = hub.admit()
        except CapacityError as error:
            await websocket.send_denial_response(_error_response(error))
            return
        offered = websocket.scope["subprotocols"]
        try:
            await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        except BaseException:
            hub.give_back(slot)
            raise
        await hub.serve(websocket, slot)


def _add_operations(app: FastAPI, hub: Hub, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """Alive; 503 only when a restart would help."""
        is_failed = hub.check() is State.FAILED
        content = {"status": "failed" if is_failed else "ok"}
        return JSONResponse(content, status_code=503 if is_failed else 200)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        is_ready = hub.check() is State.READY
        content = {"ready": is_ready, "reason": hub.state.value}
        return JSONResponse(content, status_code=200 if is_ready else 503)

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)


# ---------------------------------------------------------------------------- errors


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(PlosiveError)
    async def plosive_error(request: Request, error: PlosiveError) -> JSONResponse:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return _error_response(PlosiveError("invalid_request", first["msg"], param=param))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        codes = {404: "not_found", 405: "method_not_allowed"}
        content = _error_content(codes.get(error.status_code, "invalid_request"), error.detail)
        return JSONResponse(content, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> JSONResponse:
        content = _error_content("internal_error", INTERNAL_ERROR)
        return JSONResponse(content, status_code=500)


def _error_response(error: PlosiveError) -> JSONResponse:
    headers = {}
    if error.code == "clip_too_large":
        headers["Connection"] = "close"  # or the rest of the body would be read to its end
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse(
        _error_content(error.code, error.message, error.param),
        status_code=HTTP_STATUS.get(error.code, 400),
        headers=headers,
    )


def _error_content(code: str, message: str, param: str | None = None) -> dict[str, object]:
    return {"error": {"code": code, "message": message, "param": param}}
