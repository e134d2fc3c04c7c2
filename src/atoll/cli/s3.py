"""S3 credentials, from the environment: secrets are never in a run file."""

import os

from atoll.blobs.access import S3Access


def s3_access() -> S3Access | None:
    """What the AWS_* variables say, or None when they are not set."""
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        return None
    return S3Access(
        access_key_id=key,
        secret_access_key=secret,
        session_token=os.environ.get("AWS_SESSION_TOKEN"),
        endpoint=os.environ.get("AWS_ENDPOINT_URL"),
        region=os.environ.get("AWS_REGION", "us-east-1"),
    )
