"""Weights: recorded, remembered, saved and handed out, they are the reference's bits."""

import json
import os

from atoll.coordinator.service import Coordinator
from atoll.protocol.messages import AssignmentRequest
from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import check
from atoll.simulate.faults.invariants.rows import Rows
from atoll.simulate.faults.payloads import decode
from atoll.simulate.faults.reference import Reference
from atoll.simulate.faults.standin import LAYOUT

_FP32 = {"codec": "fp32"}


class WeightsCheck:
    """Moves the reference along with the ledger."""

    def __init__(self, reference: Reference, rows: Rows) -> None:
        self._reference = reference
        self._rows = rows
        self._snapshots: set[int] = set()

    def changed(self, after: View) -> None:
        """What was published or saved since is what the reference computes."""
        for number in range(self._reference.newest.number + 1, after.version + 1):
            for made, header in self._reference.advance(after, number):
                self._rows.counted(made, header, after)
            row = after.rounds[number]
            right = self._reference.newest.digests(self._reference.fragment(number))
            found = (row.master_digest, row.published_digest)
            check("weights-bits", found == right, round=row, reference=right)
        for version, snapshot in after.snapshots.items():
            if version not in self._snapshots:
                self._check_snapshot(version, snapshot, after)
                self._snapshots.add(version)

    def _check_snapshot(self, version: int, saved: Row, view: View) -> None:
        check("snapshot-bits", version <= view.version, saved=version, published=view.version)
        right = self._reference.versions[version]
        stored = {"master": saved.master_sha256, "published": saved.published_sha256}
        stored |= dict(json.loads(saved.slots_sha256))
        wanted = {"master": right.master, "published": right.published, **right.slots}
        names = sorted(wanted)
        check("snapshot-bits", sorted(stored) == names, version=version, saved=stored, names=names)
        for name, sha256 in stored.items():
            if os.path.exists(self._reference.path(sha256)):  # else said by blob-is-there
                _, payload = self._reference.frame(sha256)
                is_same = decode(payload, _FP32, LAYOUT.size).tobytes() == wanted[name].tobytes()
                check("snapshot-bits", is_same, version=version, other_bits=name)

    def in_memory(
        self, coordinator: Coordinator, view: View, invariant: str = "memory-follows-ledger"
    ) -> None:
        """The coordinator's current version is the ledger's newest, with the reference's bits."""
        current, version = coordinator.weights.current, view.version
        right = self._reference.versions[version]
        found = (current.version, current.digests.master.root, current.digests.published.root)
        wanted = (version, right.master_digest, right.published_digest)
        check(invariant, found == wanted, in_memory=found, wanted=wanted)

    def restored(self, coordinator: Coordinator, view: View) -> None:
        """What a restarted coordinator hands out are the reference's bytes."""
        self.in_memory(coordinator, view, "restart-equals-replay")
        spooled = coordinator.weights.frame_for(round_number=0, have_digest="")
        data = spooled.read(0, spooled.nbytes)
        payload = data[-spooled.header.payload_bytes - 32 : -32]
        right = self._reference.versions[view.version].published
        is_same = decode(payload, _FP32, LAYOUT.size).tobytes() == right.tobytes()
        check("restart-equals-replay", is_same, other_bits_handed_out=view.version)

    def told(self, version: int, digest: str | None, view: View, *, who: str) -> None:
        """Somebody was told of a version."""
        is_recorded = version <= view.version
        check("published-is-recorded", is_recorded, who=who, told=version, recorded=view.version)
        right = self._reference.versions[version].published_digest
        check("digest-agrees", digest in (None, right), who=who, told=digest, of=version, is_=right)

    def trains(self, asked: AssignmentRequest, round_number: int, needs: int) -> None:
        """Who `asked` was given rows of the round, which needs that version or a later one."""
        enough = self._reference.versions[max(0, needs) : round_number]
        is_enough = asked.digest in {version.published_digest for version in enough}
        check("digest-agrees", is_enough, asked=asked, trains=round_number, needs=needs)
