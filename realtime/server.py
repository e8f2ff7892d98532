"""The ASGI application: the `/v1/realtime` socket, voices, other APIs, health, readiness and metrics."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Response, WebSocket
from fastapi.responses import JSONResponse

from realtime.adapters import fish, openai
from realtime.auth import ApiKeys, client_of, make_rules, protect
from realtime.config import ServerConfig
from realtime.errors import CapacityError, PlosiveError
from realtime.http_errors import HttpErrors
from realtime.hub import Hub, State
from realtime.metrics import CONTENT_TYPE, Metrics
from realtime.page_routes import page_router
from realtime.pingpong.api import Engine
from realtime.slow_bodies import SlowBodies
from realtime.voice_routes import VoiceRoutes
from realtime.voices import VoiceStore
from realtime.wire import PATH, SUBPROTOCOL

SESSION_PATHS = (openai.SPEECH_PATH, fish.TTS_PATH, fish.STREAM_PATH)  # whose answers hold a slot


def create_app(engine: Engine, config: ServerConfig, voices: VoiceStore, keys: ApiKeys) -> FastAPI:
    """Everything that the server answers. The engine is started and stopped with the app.

    `app.state.hub` is the `Hub`: whoever runs the app drains it before shutting the app down.
    """
    metrics = Metrics()
    hub = Hub(engine, config, voices, metrics)
    voice_routes = VoiceRoutes(engine, config, voices)
    shapes = dict.fromkeys(openai.PATHS, openai.error_shape)
    errors = HttpErrors(shapes | dict.fromkeys(fish.PATHS, fish.error_shape))
    fish_routes = fish.Fish(hub, engine, config, voices, errors)
    openai_routes = openai.OpenAiRoutes(hub, engine.info, config, voices, errors)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        hub.start()
        try:
            yield
        finally:
            voice_routes.close()
            fish_routes.close()
            await hub.stop()

    app = FastAPI(title="Plosive", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.hub = hub
    app.include_router(voice_routes.router)
    app.include_router(fish_routes.router)
    app.include_router(openai_routes.router)
    app.include_router(page_router())
    _add_realtime(app, hub, errors)
    _add_operations(app, hub, metrics)
    _add_no_such_socket(app, errors)
    errors.install(app)
    app.add_middleware(SlowBodies, timeout_s=config.body_timeout_s)
    protect(app, make_rules(config, keys, SESSION_PATHS), errors, metrics)
    return app


def _add_realtime(app: FastAPI, hub: Hub, errors: HttpErrors) -> None:
    @app.websocket(PATH)
    async def realtime(websocket: WebSocket) -> None:
        try:
            slot = hub.admit()
        except CapacityError as error:
            await websocket.send_denial_response(errors.respond(PATH, error))
            return
        offered = websocket.scope["subprotocols"]
        try:
            await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        except BaseException:
            hub.give_back(slot)
            raise
        await hub.serve(websocket, slot, client_of(websocket.scope))


def _add_no_such_socket(app: FastAPI, errors: HttpErrors) -> None:
    """Behind all other routes: a socket at a path that has none is refused with 404."""

    @app.websocket("/{path:path}")
    async def no_such_socket(websocket: WebSocket, path: str) -> None:
        sockets = ", ".join((PATH, fish.LIVE_PATH, fish.TIMESTAMPS_PATH))
        error = PlosiveError(
            "not_found", f"there is no WebSocket at /{path[:200]}; there are: {sockets}"
        )
        await websocket.send_denial_response(errors.respond("/" + path, error, status=404))


def _add_operations(app: FastAPI, hub: Hub, metrics: Metrics) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> JSONResponse:
        """Alive; 503 only when a restart would help."""
        is_failed = hub.check() is State.FAILED
        content = {"status": "failed" if is_failed else "ok"}
        return JSONResponse(content, status_code=503 if is_failed else 200)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> JSONResponse:
        is_ready = hub.check() is State.READY
        content = {"ready": is_ready, "reason": hub.reason}
        return JSONResponse(content, status_code=200 if is_ready else 503)

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)
