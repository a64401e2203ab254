"""One HTTP request for a piece of a file: redirects, credentials, and what each answer means.

urllib, for it knows the system's proxies and certificates. Redirects are followed here and not by
it: credentials go to the origin they are meant for and to no other, and never from https to http.
"""

import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urljoin

from edgellm.hub.names import check_scheme, origin
from edgellm.hub.store import HubError

MAX_REDIRECTS = 10
REDIRECTS = (301, 302, 303, 307, 308)
PASSING = (408, 425, 429, 500, 502, 503, 504)  # a later try may succeed


class NetworkError(HubError):
    """The network or the server failed; the same request may succeed later."""


class Interrupted(Exception):
    """This try failed, another may not. `pause`: seconds the server asks to wait."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class Useless(Exception):
    """What lies here cannot be continued: start again from the first byte."""


@dataclass(frozen=True)
class Wanted:
    """A file on the web and what is known about it."""

    url: str
    name: str  # for messages
    size: int | None = None
    sha256: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # for the origin of url alone
    http_origin: str | None = None  # an origin the user has set up for plain http
    magic: bytes = b"GGUF"  # what the file begins with


@dataclass
class Piece:
    """An answer whose body begins at byte `start` of a file of `total` bytes."""

    body: Any
    start: int
    total: int | None
    validator: str | None  # for If-Range


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves redirects to the handler of errors, so that they arrive as an HTTPError."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> None:
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def ask(wanted: Wanted, start: int, validator: str | None, timeout: float) -> Piece:
    """Ask for the bytes from ``start`` on. Raises Interrupted, Useless or HubError."""
    asked = {"Accept-Encoding": "identity", "User-Agent": "edgellm"}
    if start:
        asked["Range"] = f"bytes={start}-"
        if validator:
            asked["If-Range"] = validator
    url = wanted.url
    for _ in range(MAX_REDIRECTS + 1):
        check_scheme(url, wanted.http_origin)
        own = wanted.headers if origin(url) == origin(wanted.url) else {}
        answer = _request(url, {**asked, **own}, timeout, wanted.name)
        if answer.status not in REDIRECTS:
            return _piece(wanted, answer, start, bool(own))
        place = answer.headers.get("Location")
        answer.close()
        if not place:
            raise HubError(f"{wanted.name}: the server redirects to nowhere; try again later.")
        url = _follow(url, place, wanted.name)
    raise HubError(f"{wanted.name}: more than {MAX_REDIRECTS} redirects; check the address.")


def _follow(url: str, place: str, name: str) -> str:
    try:
        target = urljoin(url, place)
        origin(target)
    except ValueError:
        target = ""
    if not target or not target.isascii() or not target.isprintable() or " " in target:
        raise HubError(f"{name}: the server redirects to what is no URL: {place[:200]!r}.")
    if url.startswith("https:") and not target.startswith("https:"):
        raise HubError(f"{name}: the server redirects from https to {target[:200]!r}; refused.")
    return target


def _request(url: str, headers: Mapping[str, str], timeout: float, name: str) -> Any:
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        return opener.open(urllib.request.Request(url, headers=dict(headers)), timeout=timeout)
    except urllib.error.HTTPError as answer:
        return answer
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise HubError(
                f"{name}: the server's certificate is not valid ({error.reason.verify_message}); "
                "behind a proxy of your own, SSL_CERT_FILE names its certificate."
            ) from error
        raise Interrupted(str(error.reason)) from error
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(str(error) or type(error).__name__) from error
    except ValueError as error:  # http.client's word for a URL or header it does not send
        raise HubError(f"{name}: {error}.") from error


def _piece(wanted: Wanted, answer: Any, start: int, with_credentials: bool) -> Piece:
    """Judge the answer; it is closed unless its body is wanted."""
    try:
        if answer.status not in (200, 206):
            _refused(wanted, answer, start, with_credentials)
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise HubError(f"{wanted.name}: the server sends a compressed form, unasked; refused.")
        if answer.status == 200:
            begin, total = 0, _number(answer.headers.get("Content-Length"))
        else:
            begin, total = _content_range(answer.headers.get("Content-Range"))
            if begin != start or total is None:
                raise Useless
        if total is None and wanted.size is None:
            raise HubError(
                f"{wanted.name}: the server does not tell the size of the file, so a cut could not "
                "be seen; download it yourself and give its path."
            )
        if None not in (total, wanted.size) and total != wanted.size:
            if start:
                raise Useless  # once more from the start, then it is said
            raise HubError(
                f"{wanted.name}: the server offers {total} bytes instead of {wanted.size}; the "
                "file has changed there, or something on the way answers in its place."
            )
    except BaseException:
        answer.close()
        raise
    return Piece(answer, begin, total if total is not None else wanted.size, _validator(answer))


def _refused(wanted: Wanted, answer: Any, start: int, with_credentials: bool) -> None:
    status = answer.status
    if status == 416:
        if start:
            raise Useless
        raise HubError(f"{wanted.name}: the server has no such range of it (HTTP 416).")
    if status in PASSING:
        raise Interrupted(f"HTTP {status}", _retry_after(answer.headers.get("Retry-After")))
    if status in (401, 403):
        how = "the token is not accepted" if with_credentials else "it needs a login"
        raise HubError(
            f"{wanted.name}: access was refused (HTTP {status}), {how}; for Hugging Face set "
            "HF_TOKEN and accept the model's licence on its page."
        )
    if status in (404, 410):
        raise HubError(f"{wanted.name} is not there (HTTP {status}): check {wanted.url}.")
    raise HubError(f"{wanted.name}: the server answered HTTP {status} for {wanted.url}.")


def _validator(answer: Any) -> str | None:
    """A strong ETag, else nothing: two versions of a second have the same date."""
    etag = answer.headers.get("ETag")
    return etag if etag and re.fullmatch(r'"[\x21\x23-\x7e]*"', etag) else None


def _content_range(text: str | None) -> tuple[int, int | None]:
    found = re.fullmatch(r"\s*bytes (\d{1,18})-(\d{1,18})/(\d{1,18})\s*", text or "")
    return (int(found[1]), int(found[3])) if found else (-1, None)


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d{1,18}", text.strip()) else None


def _retry_after(text: str | None) -> float:
    """Seconds, a minute at most."""
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return min(max(seconds, 0.0), 60.0)
