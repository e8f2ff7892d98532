"""`/model`: the voice store as Fish's models. What the store does not keep is kept in files beside it."""

import asyncio
import secrets
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData

from realtime.adapters.fish_request import Reference, invalid_field, read_json
from realtime.adapters.fish_voices import Voices
from realtime.adapters.speech import BodyReader
from realtime.errors import PlosiveError, VoiceError, shorten
from realtime.voices import VoiceInfo, VoiceStore, write_atomically

_MAX_CLIPS = 20
_FORM = ("multipart/form-data", "application/x-www-form-urlencoded")

_Items = list[Annotated[str, Field(max_length=64)]]


class Details(BaseModel):
    """What a client may say of a voice, and when it did."""

    model_config = ConfigDict(extra="ignore")

    title: str = Field(min_length=1, max_length=200)
    description: str = Field(default="", max_length=2_000)
    tags: _Items = Field(default=[], max_length=32)
    languages: _Items = Field(default=[], max_length=32)
    visibility: Literal["public", "unlist", "private"] = "private"
    created_at: datetime
    updated_at: datetime


class Models:
    def __init__(
        self, store: VoiceStore, voices: Voices, folder: Path, body_reader: BodyReader
    ) -> None:
        self._store = store
        self._voices = voices
        self._folder = folder
        self._body = body_reader
        self._started_at = datetime.now(UTC)

    # ------------------------------------------------------------------ routes

    async def search(
        self,
        request: Request,
        page_size: Annotated[str, Query()] = "10",
        page_number: Annotated[str, Query()] = "1",
        title: str = "",
        self_only: Annotated[str, Query(alias="self")] = "false",
        sort_by: str = "score",
    ) -> dict[str, object]:
        size = _number("page_size", page_size, 100)
        first = size * (_number("page_number", page_number, 1_000_000) - 1)
        wanted = {
            name: set(request.query_params.getlist(name))
            for name in ("tag", "language", "author_id")
        }
        found = [
            model
            for model in await asyncio.to_thread(self._all, is_own=self_only.lower() == "true")
            if title.lower() in model["title"].lower()
            and wanted["tag"] <= set(model["tags"])
            and (not wanted["language"] or wanted["language"] & set(model["languages"]))
            and wanted["author_id"] <= {model["author"]["_id"]}
        ]
        if sort_by == "created_at":
            found.sort(key=lambda model: model["created_at"], reverse=True)
        return {
            "total": len(found),
            "items": found[first : first + size],
            "has_more": first + size < len(found),
            "window_limited": False,
            "total_is_exact": True,
        }

    async def get(self, model_id: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._find, model_id)

    async def create(self, request: Request) -> dict[str, Any]:
        form = await self._read_form(request)
        for name, expected in (("type", "tts"), ("train_mode", "fast")):
            if form.fields.get(name, [expected]) != [expected]:
                got = shorten(", ".join(form.fields[name]))
                message = f"{name}: got {got}, only {expected!r} is supported"
                raise PlosiveError("not_supported", message, param=name)
        now = datetime.now(UTC)
        details = _details({**_fields(form), "created_at": now, "updated_at": now})
        references = _references(form)
        model_id = secrets.token_hex(16)
        self._store.check_addable(model_id, "\n".join(clip.text for clip in references))
        voice = await self._voices.encode(model_id, references)
        return await asyncio.to_thread(self._add, model_id, voice.text, voice.codes, details)

    async def update(self, model_id: str, request: Request) -> dict[str, Any]:
        fields = _fields(await self._read_form(request))
        return await asyncio.to_thread(self._change, model_id, fields)

    async def delete(self, model_id: str) -> Response:
        await asyncio.to_thread(self._remove, model_id)
        return Response(status_code=204)

    # ------------------------------------------------------------------ on a worker thread

    def _all(self, *, is_own: bool) -> list[dict[str, Any]]:
        infos = [info for info in self._store.infos() if not (is_own and info.is_builtin)]
        return [self._describe(info) for info in infos]

    def _find(self, model_id: str) -> dict[str, Any]:
        return self._describe(self._info(model_id))

    def _info(self, model_id: str) -> VoiceInfo:
        for info in self._store.infos():
            if info.name == model_id:
                return info
        message = f"there is no model {model_id[:64]!r}"
        raise VoiceError("voice_not_found", message, param="id")

    def _add(self, model_id: str, text: str, codes: Any, details: Details) -> dict[str, Any]:
        self._write(model_id, details)  # first: a voice in the list has its title
        try:
            self._store.add(model_id, text, codes)
        except BaseException:
            self._file(model_id).unlink(missing_ok=True)
            raise
        return self._find(model_id)

    def _change(self, model_id: str, fields: dict[str, object]) -> dict[str, Any]:
        info = self._info(model_id)
        if info.is_builtin:
            raise VoiceError("voice_protected", f"{model_id!r} is a built-in voice")
        old = self._details_of(info).model_dump()
        details = _details({**old, **fields, "updated_at": datetime.now(UTC)})
        self._write(model_id, details)
        return self._find(model_id)

    def _remove(self, model_id: str) -> None:
        self._info(model_id)
        self._store.remove(model_id)
        self._file(model_id).unlink(missing_ok=True)

    def _details_of(self, info: VoiceInfo) -> Details:
        try:
            return Details.model_validate_json(self._file(info.name).read_bytes())
        except (OSError, ValueError):  # built in, or added through another API
            since = self._started_at
            return Details(
                title=info.name,
                visibility="public" if info.is_builtin else "private",
                created_at=since,
                updated_at=since,
            )

    def _describe(self, info: VoiceInfo) -> dict[str, Any]:
        return {
            "_id": info.name,
            "type": "tts",
            **self._details_of(info).model_dump(mode="json"),
            "cover_image": "",
            "train_mode": "fast",
            "state": "trained",
            "samples": [],
            "lock_visibility": info.is_builtin,
            "like_count": 0,
            "mark_count": 0,
            "shared_count": 0,
            "task_count": 0,
            "liked": False,
            "marked": False,
            "author": {"_id": "plosive", "nickname": "Plosive", "avatar": ""},
        }

    def _write(self, model_id: str, details: Details) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file(model_id), details.model_dump_json().encode())

    def _file(self, model_id: str) -> Path:
        return self._folder / f"{model_id}.json"  # only of names that the store has

    # ------------------------------------------------------------------ forms

    async def _read_form(self, request: Request) -> "_Form":
        """A form, or for what has no files also JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (*_FORM, "application/json"):
            raise PlosiveError(
                "unsupported_media_type", f"got Content-Type {kind[:80]!r}, expected {_FORM[0]}"
            )
        body = await self._body.read(request)
        if kind == "application/json":
            return _form_of_json(body)

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": body}

        again = Request(request.scope, receive)
        async with again.form(max_files=_MAX_CLIPS + 1, max_fields=100) as data:
            return await _form_of(data)


@dataclass(frozen=True, slots=True)
class _Form:
    fields: dict[str, list[str]]
    clips: list[bytes]


async def _form_of(data: FormData) -> _Form:
    form = _Form({}, [])
    for name, value in data.multi_items():
        if isinstance(value, str):
            form.fields.setdefault(name, []).append(value)
        elif name == "voices":
            form.clips.append(await value.read())
    return form


def _form_of_json(body: bytes) -> _Form:
    several = {
        name: value if isinstance(value, list) else [value]
        for name, value in read_json(body).items()
    }
    fields = {
        name: [str(v) for v in values] for name, values in several.items() if values != [None]
    }
    return _Form(fields, [])


def _fields(form: _Form) -> dict[str, object]:
    """Those that `Details` knows and a client may set."""
    several, single = ("tags", "languages"), ("title", "description", "visibility")
    return {
        name: values if name in several else values[-1]
        for name, values in form.fields.items()
        if values and name in (*several, *single)
    }


def _details(values: dict[str, object]) -> Details:
    try:
        return Details.model_validate(values)
    except ValidationError as error:
        raise invalid_field(error) from error


def _references(form: _Form) -> list[Reference]:
    clips, texts = form.clips, form.fields.get("texts", [])
    if not clips:
        raise VoiceError("invalid_clip", "voices: expected at least one audio file", param="voices")
    if len(texts) != len(clips):
        raise VoiceError(
            "invalid_voice",
            f"texts: got {len(texts)} for {len(clips)} clips; give the words of each clip: "
            "this server does not transcribe",
            param="texts",
        )
    return [Reference(audio=clip, text=text) for clip, text in zip(clips, texts, strict=True)]


def _number(param: str, text: str, highest: int) -> int:
    is_number = text.isdecimal() and len(text) <= len(str(highest))
    if not is_number or not 1 <= int(text) <= highest:
        message = f"{param}: got {text[:20]!r}, expected 1 to {highest}"
        raise PlosiveError("invalid_field", message, param=param)
    return int(text)
