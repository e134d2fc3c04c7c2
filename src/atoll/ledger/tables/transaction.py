"""All tables of a ledger, bound to the transaction in which they are read and changed."""

import hashlib

from atoll import canonical
from atoll.ledger.connection import Connection
from atoll.ledger.tables import schema
from atoll.ledger.tables.contributions import ContributionTable
from atoll.ledger.tables.groups import CheckpointTable, GroupTable, SaveTable
from atoll.ledger.tables.leases import LeaseTable
from atoll.ledger.tables.members import MemberTable
from atoll.ledger.tables.pulled import AnnouncementTable, PublisherTable, SkipTable
from atoll.ledger.tables.queues import DatasetTable, QueueTable
from atoll.ledger.tables.rounds import RoundTable
from atoll.ledger.tables.run import ManifestTable, NamedValues, RunTable
from atoll.ledger.tables.snapshots import EvaluationTable, SnapshotTable


class Transaction:
    """The tables of a ledger; for the thread whose transaction is open, and only until it ends."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.run = RunTable(connection)
        self.credentials = NamedValues(connection, schema.credentials)  # by role, its token's hash
        self.control = NamedValues(connection, schema.control)  # what the operator wants
        self.datasets = DatasetTable(connection)
        self.queues = QueueTable(connection, self.datasets)
        self.snapshots = SnapshotTable(connection)
        self.leases = LeaseTable(connection, self.queues)
        self.members = MemberTable(connection, self.leases)
        self.evaluations = EvaluationTable(connection, self.members)
        self.contributions = ContributionTable(connection, self.members, self.leases)
        self.rounds = RoundTable(connection, self.leases, self.contributions)
        self.manifests = ManifestTable(connection, self.rounds)
        self.publishers = PublisherTable(connection)
        self.announcements = AnnouncementTable(connection)
        self.skips = SkipTable(connection)
        self.groups = GroupTable(connection)
        self.saves = SaveTable(connection)
        self.checkpoints = CheckpointTable(connection)

    def state_hash(self) -> str:
        """sha256 over every row of every table: equal exactly when the durable state is."""
        digest = hashlib.sha256()
        for name, statements in sorted(schema.STATEMENTS.items()):
            for row in self.connection.stream(statements.all):
                digest.update(canonical.dumps([name, *(_exact(value) for value in row)]).encode())
                digest.update(b"\n")
        return digest.hexdigest()


def _exact(value: object) -> object:
    """A stored value in a form that JSON keeps exactly, the same for both engines.

    SQLite gives 0 and 1 where PostgreSQL gives False and True.
    """
    if isinstance(value, float | bytes):
        return value.hex()
    return int(value) if isinstance(value, bool) else value
