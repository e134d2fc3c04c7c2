"""What an S3 client needs to know, as a value. Reads no environment and imports no client."""

from dataclasses import dataclass, field

from atoll.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Access:
    """Where an S3 server is and the credentials for it.

    Without `endpoint` it is Amazon's own in `region`. Plain http is used only when the endpoint
    says so.
    """

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str = "us-east-1"
    endpoint: str | None = None
    retries: int = 5
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not self.access_key_id or not self.secret_access_key:
            raise ConfigError("s3 access needs both an access key id and a secret access key")
        if not self.url.startswith(("http://", "https://")):
            rule = "must start with https:// (or http:// for a server on this machine)"
            raise ConfigError(f"s3 endpoint={self.endpoint!r} {rule}")

    @property
    def url(self) -> str:
        """The endpoint requests go to."""
        return (self.endpoint or f"https://s3.{self.region}.amazonaws.com").rstrip("/")
