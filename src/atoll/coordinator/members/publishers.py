"""Whether a worker may publish as it says: its key, and a bucket of the run."""

from collections.abc import Mapping

from atoll.errors import ConfigError
from atoll.gather.keys import PublicKey
from atoll.ledger.records import PublisherRecord
from atoll.protocol.messages import RegisterRequest
from atoll.versions.manifests import Recorded


def stated(request: RegisterRequest, in_force: Recorded) -> PublisherRecord | None:
    """What the worker says of itself; None in a run in which nobody publishes.

    ConfigError when it says nothing where all publish, or something where nobody does, for a key
    that anybody can sign for, and for a bucket that the run does not have.
    """
    said, name = request.publishes, request.worker_id
    if not in_force.any_strategy.gathers:
        if said is not None:
            raise ConfigError(
                f"worker_id={name!r} names bucket {said.bucket!r} and a key, and nobody publishes "
                f"in this run, to which contributions are uploaded; leave them out"
            )
        return None
    known = sorted(in_force.manifest.gather.buckets)
    if said is None:
        raise ConfigError(
            f"worker_id={name!r} names neither a key nor a bucket; in this run every island "
            f"publishes into one of {', '.join(known)}, so join with --bucket"
        )
    if said.bucket not in known:
        raise ConfigError(
            f"bucket={said.bucket!r} of worker_id={name!r} is not one of the run's, "
            f"{', '.join(known)}; choose one of them with --bucket"
        )
    PublicKey.parse(said.key)
    return PublisherRecord(name, said.key, said.bucket)


def check(publisher: PublisherRecord, known: Mapping[str, PublisherRecord]) -> None:
    """ConfigError for another's key, and for another key or bucket than the worker has."""
    name = publisher.worker_id
    before = known.get(name)
    if before is not None and before != publisher:
        raise ConfigError(
            f"worker_id={name!r} publishes into {before.bucket!r} with the key "
            f"{before.public_key} and now says {publisher.bucket!r} and {publisher.public_key}; "
            f"both stay for the whole run: use its own state directory and --bucket, or choose "
            f"another --worker-id"
        )
    for other in known.values():
        if other.public_key == publisher.public_key and other.worker_id != name:
            raise ConfigError(
                f"the key {publisher.public_key} of worker_id={name!r} is that of "
                f"{other.worker_id!r}; each island signs with a key of its own, so give it a state "
                f"directory of its own"
            )
