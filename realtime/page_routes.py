"""`GET /`: a page to hear the server with; its few files are in `realtime/page/`."""

from pathlib import Path

from fastapi import APIRouter, Response

ASSETS_PATH = "/page/"
FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """Routes of the page and of each of its files, read once."""
    router = APIRouter()
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in MEDIA_TYPES:
            url = "/" if path.name == "index.html" else ASSETS_PATH + path.name
            _add_file(router, url, path.read_bytes(), MEDIA_TYPES[path.suffix])
    return router


def _add_file(router: APIRouter, url: str, content: bytes, media_type: str) -> None:
    @router.api_route(url, methods=["GET", "HEAD"], include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)
