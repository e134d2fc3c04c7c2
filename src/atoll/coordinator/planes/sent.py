"""What a gRPC message says about its sender, as the coordinator knows it."""

from pydantic import ValidationError

from atoll.errors import ProtocolError
from atoll.protocol.messages import Identity
from atoll.wire.proto import transfer_pb2


def identity(message: transfer_pb2.Identity) -> Identity:
    """Who speaks; ProtocolError for what no identity says."""
    try:
        return Identity(**{name: getattr(message, name) for name in Identity.model_fields})
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        raise ProtocolError(f"identity.{first['loc'][0]}: {first['msg']}") from exc
