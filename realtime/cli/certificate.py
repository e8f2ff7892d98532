"""What `--ssl-certfile` and `--ssl-keyfile` name, looked at before the model is loaded: uvicorn reads it
afterwards, and waits at the terminal for a password."""

import ssl
from pathlib import Path

from realtime.config import named
from realtime.errors import PlosiveError


def check_certificate(certfile: Path | None, keyfile: Path | None) -> None:
    """Raises PlosiveError `invalid_config`, which says which file is wrong, why and what to do."""
    if certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except OSError as error:
        raise PlosiveError("invalid_config", _fault(certfile, keyfile)) from error


def _fault(certfile: Path, keyfile: Path | None) -> str:
    of_certificate, of_key = (
        named("ssl_certfile"),
        named("ssl_keyfile" if keyfile else "ssl_certfile"),
    )
    file = keyfile or certfile
    try:
        certificates, key = certfile.read_bytes(), file.read_bytes()
    except OSError as unreadable:
        which = of_certificate if unreadable.filename == str(certfile) else of_key
        return f"{which}: {unreadable.filename}: {unreadable.strerror}"
    if b"CERTIFICATE-----" not in certificates:
        return f"{of_certificate}: there is no certificate (PEM) in {certfile}"
    if b"PRIVATE KEY-----" not in key:
        elsewhere = "" if keyfile else "; name the file that has it with --ssl-keyfile"
        return f"{of_key}: there is no private key (PEM) in {file}{elsewhere}"
    if b"ENCRYPTED" in key:
        way_out = f"openssl pkey -in {file} -out FILE writes one without"
        return f"{of_key}: the private key in {file} has a password; {way_out}"
    return f"{of_key}: the private key in {file} is not the one of {certfile}, or one is damaged"
