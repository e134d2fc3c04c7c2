"""Whether a round's artifact is the one that its contributions make."""

from atoll.proof.report import AuditReport
from atoll.versions.replay import Replay, Replayed
from atoll.wire import frame
from atoll.wire.header import Told


def check(report: AuditReport, replay: Replay, replayed: Replayed, *, base: str) -> None:
    """Makes the frame of a replayed round again, over weights of digest `base`; compares hashes."""
    record = replayed.record
    found = _sha256(replay, replayed, run_id=report.run_id, base=base)
    if found != record.artifact_sha256:
        said = f"its contributions make {found}, the ledger says {record.artifact_sha256}"
        report.add(record.round, "artifact", said)


def _sha256(replay: Replay, replayed: Replayed, *, run_id: str, base: str) -> str | None:
    """None for a round whose version does not travel as its contributions."""
    number, contributions = replayed.record.round, replayed.contributions
    bundle = replay.bundle(number, contributions)
    if bundle is None:
        return None
    header = Told(
        kind="update",
        run_id=run_id,
        manifest_sha256=replay.manifests.of_round(number).sha256,
        round=number,
        fragment=replayed.record.fragment,
        base_digest=base,
        result_digest=replayed.digests.published.root,
    ).header(replayed.fragment.layout, bundle)
    passed = frame.Hashing()
    for piece in replay.bundled(bundle, header, contributions, replayed.step):
        passed.write(memoryview(piece))
    return passed.digest()
