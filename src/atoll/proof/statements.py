"""Whether every pulled contribution was stated by its worker: signature and fields, once more."""

from collections.abc import Iterable, Mapping, Sequence

from atoll.errors import AtollError
from atoll.gather import statement as statements
from atoll.gather.keys import PublicKey
from atoll.gather.statement import Statement
from atoll.gather.words import Skip
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ContributionRecord, LeaseRecord, LeaseState
from atoll.proof.report import AuditReport
from atoll.protocol import gather


def check(
    report: AuditReport,
    ledger: Ledger,
    contributions: Iterable[ContributionRecord],
    held: Mapping[int, Sequence[LeaseRecord]],
    manifest_of: Mapping[int, str],
) -> None:
    """Adds a problem for each contribution whose recorded statement is not its worker's own.

    `held` are the leases of each round, `manifest_of` the hash of the manifest it is under.
    """
    with ledger.reading() as t:
        keys = {p.worker_id: p.public_key for p in t.publishers.all()}
    for number, made in _by_round(contributions).items():
        with ledger.reading() as t:
            stated = {a.worker_id: a.statement for a in t.announcements.of_round(number)}
        for contribution in made:
            name = contribution.worker_id
            mine = [lease for lease in held.get(number, ()) if lease.worker_id == name]
            right = _right(report.run_id, contribution, mine, manifest_of.get(number, ""))
            wrong = _difference(stated.get(name), keys.get(name), right)
            if wrong:
                report.add(number, "statement", f"of {name!r}: {wrong}")


def _by_round(made: Iterable[ContributionRecord]) -> dict[int, list[ContributionRecord]]:
    found: dict[int, list[ContributionRecord]] = {}
    for contribution in made:
        found.setdefault(contribution.round, []).append(contribution)
    return found


def _right(
    run_id: str, made: ContributionRecord, leases: Sequence[LeaseRecord], manifest: str
) -> dict[str, object]:
    rows = [lease.row_range for lease in leases if lease.state is LeaseState.DONE]
    return {
        "run_id": run_id,
        "manifest_sha256": manifest,
        "uid": made.worker_id,
        "window": made.round,
        "base_digest": made.base,
        "sample_digest": gather.sample_digest(rows),
        "nbytes": made.nbytes,
        "sha256": made.sha256,
    }


def _difference(stated: str | None, key: str | None, right: Mapping[str, object]) -> str:
    """What is wrong with a statement; "" when nothing is."""
    if stated is None:
        return "none is recorded for its contribution"
    if key is None:
        return "the key that it is to be signed with is not recorded"
    try:
        found = statements.read(stated.encode(), PublicKey.parse(key))
    except (Skip, AtollError) as error:
        return str(error)
    return _field(found, right)


def _field(found: Statement, right: Mapping[str, object]) -> str:
    for name, wanted in right.items():
        if (said := getattr(found, name)) != wanted:
            return f"{name}={said!r} is stated, recorded is {wanted!r}"
    return ""
