"""https and wss by the server itself, with a certificate that only who is told of it trusts."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect

import clients.sync
from clients import AudioFormat, ConnectionFailed, decode_turn
from clients.voices import add_voice, delete_voice, list_voices
from realtime import wire
from realtime.cli.serve import bind, load_engine, serve, url_of
from realtime.config import ConfigError, ServerConfig
from tests.fakes import FakeEngine
from tests.realtime.support import TIMEOUT_S, Served, make_engine, serving
from tests.realtime.test_voices import clip

TEXT = "The quick brown fox jumps over the lazy dog. Then it sleeps until noon."
PCM = AudioFormat(codec="pcm_s16le", sample_rate=24_000)


class Certificate(NamedTuple):
    file: Path
    key: Path

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.file)


def make_certificate(folder: Path) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    file, key = folder / "certificate.pem", folder / "key.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    subprocess.run(
        ["openssl", "req", "-x509", *kind, "-subj", "/CN=localhost", "-addext", names]
        + ["-keyout", str(key), "-out", str(file)],
        check=True,
        capture_output=True,
    )
    return Certificate(file, key)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def serving_tls(
    folder: Path, certificate: Certificate, engine: FakeEngine | None = None, **options: float
) -> AsyncIterator[tuple[Served, str]]:
    files = {"ssl_certfile": certificate.file, "ssl_keyfile": certificate.key}
    async with serving(folder, engine, **files, **options) as served:
        yield served, f"https://localhost:{served.port}"


async def test_the_sdk_speaks_and_interrupts(tmp_path: Path, certificate: Certificate) -> None:
    engine = make_engine(tmp_path)
    async with serving_tls(tmp_path, certificate, engine) as (served, url):
        trust = certificate.trusting()
        for address in (url, url.replace("https", "wss")):
            async with clients.connect(address, format=PCM, ssl_context=trust) as session:
                speech = session.say(TEXT)
                packets = [packet async for packet in speech]
                assert speech.turn.metrics is not None
                num_samples = speech.turn.metrics.num_samples
                heard, _ = decode_turn(packets, session.format, num_samples)
                assert np.abs(heard - engine.pcm(0, 1)[-num_samples:]).max() < 1e-4
                async for _ in session.say(TEXT * 20):
                    break
                assert (await session.interrupt(played_ms=20)).remaining_text
            await served.until_free()


async def test_the_blocking_twin_and_the_voices(tmp_path: Path, certificate: Certificate) -> None:
    recording = tmp_path / "anna.wav"
    recording.write_bytes(clip())

    def use(url: str) -> None:
        trust = certificate.trusting()
        add_voice(url, "anna", recording, "What she says.", ssl_context=trust)
        assert {voice.name for voice in list_voices(url, ssl_context=trust)} == {"anna", "tone"}
        with clients.sync.connect(url, voice="anna", ssl_context=trust) as session:
            assert list(session.say("Hello."))
        delete_voice(url, "anna", ssl_context=trust)

    async with serving_tls(tmp_path, certificate) as (_, url):
        await asyncio.to_thread(use, url)


async def test_a_certificate_that_nobody_trusts_says_what_to_do(
    tmp_path: Path, certificate: Certificate
) -> None:
    why = "certificate is not trusted .self-signed certificate.. Name the file .* SSL_CERT_FILE$"
    async with serving_tls(tmp_path, certificate) as (_, url):
        with pytest.raises(ConnectionFailed, match=why):
            async with clients.connect(url):
                pass
        with pytest.raises(ConnectionFailed, match=why):
            await asyncio.to_thread(list_voices, url)


@pytest.mark.parametrize(
    ("has_certificate", "address", "why"),
    [
        (True, "http://127.0.0.1:{port}", "One with a certificate is reached by https or wss$"),
        (False, "https://127.0.0.1:{port}", "does not speak TLS: its address begins with http"),
        (True, "https://[::ffff:127.0.0.1]:{port}", "is another server's: .* Connect by a name"),
    ],
)
async def test_an_address_of_the_other_kind_says_so(
    tmp_path: Path, certificate: Certificate, has_certificate: bool, address: str, why: str
) -> None:
    files = {"ssl_certfile": certificate.file, "ssl_keyfile": certificate.key}
    trust = certificate.trusting()
    async with serving(tmp_path, FakeEngine(), **(files if has_certificate else {})) as served:
        url = address.format(port=served.port)
        with pytest.raises(ConnectionFailed, match=why):
            async with clients.connect(url, ssl_context=trust):
                pass
        with pytest.raises(ConnectionFailed, match=why):
            await asyncio.to_thread(list_voices, url, ssl_context=trust)


async def test_ssl_cert_file_is_enough(
    tmp_path: Path, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    async with serving_tls(tmp_path, certificate) as (_, url):
        assert await asyncio.to_thread(list_voices, url)
        async with clients.connect(url) as session:
            assert [packet async for packet in session.say("Hello.")]


async def test_other_apis_too(tmp_path: Path, certificate: Certificate) -> None:
    async with (
        serving_tls(tmp_path, certificate) as (_, url),
        httpx.AsyncClient(base_url=url, verify=certificate.trusting(), trust_env=False) as http,
    ):
        assert (await http.post("/v1/tts", json={"text": TEXT})).content
        assert (await http.get("/")).status_code == 200


async def test_a_client_that_does_not_read_is_closed(
    tmp_path: Path, certificate: Certificate
) -> None:
    """TLS has buffers of its own."""
    async with serving_tls(tmp_path, certificate, write_stall_s=0.3) as (served, url):
        address = url.replace("https", "wss") + wire.PATH
        trust = certificate.trusting()
        async with connect(
            address, ssl=trust, proxy=None, max_queue=1, close_timeout=0.2
        ) as socket:
            pcm = AudioFormat(codec="pcm_s16le", sample_rate=48_000)
            for message in (
                wire.SessionStart(format=pcm, max_lead_ms=60_000),
                *(wire.TextAppend(turn_id=1, text=TEXT * 200) for _ in range(4)),
                wire.TurnCommit(turn_id=1),
            ):
                await socket.send(wire.encode(message))
            await served.until_free()
            await served.until_idle()


async def test_plain_http_is_not_answered(tmp_path: Path, certificate: Certificate) -> None:
    async with serving_tls(tmp_path, certificate) as (served, _), served.http() as http:
        with pytest.raises(httpx.TransportError):
            await http.get("/health", timeout=TIMEOUT_S)


def test_what_is_no_certificate_is_said_before_the_model_is_loaded(
    tmp_path: Path, certificate: Certificate, capsys: pytest.CaptureFixture[str]
) -> None:
    locked, other = tmp_path / "locked.pem", tmp_path / "other.pem"
    for command in (
        ["pkey", "-in", str(certificate.key), "-aes256", "-passout", "pass:x", "-out", str(locked)],
        ["genpkey", "-algorithm", "RSA", "-out", str(other)],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    none, key, cert = tmp_path / "none.pem", certificate.key, certificate.file
    for files, told in (
        ((none, None), f"--ssl-certfile (PLOSIVE_SSL_CERTFILE): {none}: No such file or directory"),
        ((cert, none), f"--ssl-keyfile (PLOSIVE_SSL_KEYFILE): {none}: No such file or directory"),
        (
            (key, None),
            f"--ssl-certfile (PLOSIVE_SSL_CERTFILE): there is no certificate (PEM) in {key}",
        ),
        ((cert, None), f"in {cert}; name the file that has it with --ssl-keyfile"),
        (
            (cert, cert),
            f"--ssl-keyfile (PLOSIVE_SSL_KEYFILE): there is no private key (PEM) in {cert}",
        ),
        (
            (cert, locked),
            f"--ssl-keyfile (PLOSIVE_SSL_KEYFILE): the private key in {locked} has a password; openssl pkey",
        ),
        ((cert, other), f"the private key in {other} is not the one of {cert}"),
    ):
        config = ServerConfig(port=0, ssl_certfile=files[0], ssl_keyfile=files[1])
        assert serve(config, load_engine) == 1
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1, error


def test_a_key_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="ssl_keyfile: got key.pem, expected an --ssl-certfile"):
        ServerConfig(ssl_keyfile=Path("key.pem"))


def test_the_announced_address_is_https(certificate: Certificate) -> None:
    config = ServerConfig(ssl_certfile=certificate.file, ssl_keyfile=certificate.key)
    with bind("127.0.0.1", 0) as sock:
        assert url_of(config, sock) == f"https://127.0.0.1:{sock.getsockname()[1]}"
