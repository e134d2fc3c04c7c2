"""AWS Signature Version 4: the headers by which an S3 server knows who asks.

Only what the bucket client sends: path-style requests whose path needs no quoting, signed over the
method, the path, the query, the host, the time and the sha256 of the body. The time is an argument.
"""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from atoll.blobs.access import S3Access

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_ALGORITHM = "AWS4-HMAC-SHA256"


def query_text(query: Mapping[str, str]) -> str:
    """The one spelling of a query, as it is signed and sent."""
    return "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted(query.items()))


def headers(
    method: str,
    url: str,
    *,
    access: S3Access,
    body_sha256: str = EMPTY_SHA256,
    wall: float,
) -> dict[str, str]:
    """What a request for `url`, its query spelled by `query_text`, carries beside its own headers.

    `wall` is the time in seconds since 1970; servers refuse one that is a quarter of an hour off.
    """
    parts = urlsplit(url)
    moment = datetime.fromtimestamp(wall, UTC).strftime("%Y%m%dT%H%M%SZ")
    signed = {
        "host": parts.netloc,
        "x-amz-content-sha256": body_sha256,
        "x-amz-date": moment,
    }
    if access.session_token is not None:
        signed["x-amz-security-token"] = access.session_token
    names = ";".join(signed)  # in order already
    lines = "".join(f"{name}:{value}\n" for name, value in signed.items())
    request = "\n".join([method, parts.path, parts.query, lines, names, body_sha256])
    scope = f"{moment[:8]}/{access.region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    signature = _hmac(_key(access, scope), "\n".join([_ALGORITHM, moment, scope, digest])).hex()
    signed["authorization"] = (
        f"{_ALGORITHM} Credential={access.access_key_id}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    return signed


def _key(access: S3Access, scope: str) -> bytes:
    key = b"AWS4" + access.secret_access_key.encode()
    for part in scope.split("/"):
        key = _hmac(key, part)
    return key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
