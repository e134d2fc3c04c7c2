"""What the answers of an S3 server mean, and which of them are not believed. Makes no request."""

import email.utils
import re
from dataclasses import dataclass
from xml.etree import ElementTree

import httpx

from atoll.blobs import bucket as buckets
from atoll.blobs.bucket import Tag
from atoll.errors import AtollError, ObjectRefused, ObjectSize

_NUMBER = re.compile(r"[0-9]{1,18}\Z")
MAX_ENTITY = 256  # characters; it is sent back with every range


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing, and the token that asks for the next one."""

    keys: tuple[str, ...]
    next: str | None


def tag(response: httpx.Response, where: str) -> Tag | None:
    """The tag in the answer to a HEAD; None for an object that is not there."""
    if response.status_code == 404:
        return None
    length, entity = _length(response), response.headers.get("etag", "")
    # Sent back as it came, so it must be such as a header takes.
    is_sendable = 0 < len(entity) <= MAX_ENTITY and entity.isascii() and entity.isprintable()
    if response.status_code != 200 or length is None or not is_sendable:
        raise ObjectRefused(
            f"{where} was looked up and answered with status {response.status_code}, "
            f"content-length {length} and etag {entity[:80]!r}; a server must tell size and etag"
        )
    return Tag(length, entity, _modified(response))


def check_written(response: httpx.Response, where: str) -> None:
    """ObjectRefused unless the answer to a PUT says that the object is stored."""
    if response.status_code not in (200, 204):
        raise ObjectRefused(
            f"{where} was not stored (status {response.status_code}); check that the bucket exists"
        )


def check_range(response: httpx.Response, where: str, pinned: Tag, start: int, stop: int) -> None:
    """Raises, before a byte of the body is read, unless it is the range of the pinned object."""
    wrong = _wrong(response, where, pinned, start, stop)
    if wrong is not None:
        raise wrong


def _wrong(
    response: httpx.Response, where: str, pinned: Tag, start: int, stop: int
) -> AtollError | None:
    status, headers = response.status_code, response.headers
    whole = start == 0 and stop == pinned.nbytes
    said = headers.get("content-range")
    length = _length(response)
    if status == 404:
        return buckets.missing(where)
    if status in (412, 416) or headers.get("etag") != pinned.entity:
        return buckets.changed(where)
    if status == 206 and said != f"bytes {start}-{stop - 1}/{pinned.nbytes}":
        return ObjectSize(
            f"{where} was asked for bytes {start} to {stop} of {pinned.nbytes} and answered with "
            f"content-range {str(said)[:80]!r}; its server does not keep to the range"
        )
    if status == 200 and not whole:
        return ObjectSize(
            f"{where} was asked for bytes {start} to {stop} of {pinned.nbytes} and answered with "
            f"all of it; its server knows no ranges"
        )
    if status not in (200, 206):
        return ObjectRefused(f"{where} was asked for and answered with status {status}")
    if "content-length" in headers and length != stop - start:
        return size(where, start, stop, found=f"a content-length of {length}")
    return None


def size(where: str, start: int, stop: int, *, found: str) -> ObjectSize:
    """The error for an answer with more or fewer bytes than were asked for."""
    return ObjectSize(
        f"{where} was asked for {stop - start} bytes from {start} and gave {found}; "
        f"nothing beyond what was asked for is read"
    )


def page(response: httpx.Response, data: bytes, folder: str, where: str) -> Page:
    """The keys in one page of a listing; those that are no keys of ours are left out."""
    try:
        if response.status_code != 200 or b"<!" in data:  # a listing declares nothing
            raise ValueError(f"status {response.status_code}, {len(data)} bytes")
        root = ElementTree.fromstring(data)
    except (ValueError, ElementTree.ParseError) as exc:
        raise ObjectRefused(
            f"{where} was listed and answered with no listing ({exc}); check that the bucket "
            f"exists and the endpoint is an S3 server"
        ) from exc
    found = [text for text in _texts(root, "Contents/{*}Key") if text.startswith(folder)]
    more = _texts(root, "IsTruncated") == ["true"]
    tokens = _texts(root, "NextContinuationToken") if more else []
    return Page(tuple(filter(buckets.is_key, found)), tokens[0] if tokens else None)


def _texts(root: ElementTree.Element, path: str) -> list[str]:
    return [element.text or "" for element in root.findall(f"{{*}}{path}")]


def _length(response: httpx.Response) -> int | None:
    text = response.headers.get("content-length", "")
    return int(text) if _NUMBER.match(text) else None


def _modified(response: httpx.Response) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(response.headers["last-modified"]).timestamp()
    except (KeyError, ValueError, OverflowError):
        return None
