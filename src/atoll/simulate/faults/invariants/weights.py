"""Weights: recorded, remembered, saved and handed out, they are the reference's bits."""

import json
import os

from atoll.coordinator.service import Coordinator
from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import Violation
from atoll.simulate.faults.invariants.rows import Rows
from atoll.simulate.faults.reference import Reference, decode

_FP32 = {"codec": "fp32"}


class WeightsCheck:
    """Moves the reference along with the ledger."""

    def __init__(self, reference: Reference, rows: Rows) -> None:
        self._reference = reference
        self._rows = rows
        self._snapshots: set[int] = set()

    def changed(self, after: View) -> None:
        """What was published or saved since is what the reference computes."""
        while self._reference.newest.number < after.version:
            number = self._reference.newest.number + 1
            for row, header in self._reference.advance(after, number):
                self._rows.counted(row["round"], row["worker_id"], header, after)
            self._check_round(after, number)
        for version, snapshot in after.snapshots.items():
            if version not in self._snapshots:
                self._check_snapshot(version, snapshot, after)
                self._snapshots.add(version)

    def _check_round(self, view: View, number: int) -> None:
        row = view.rounds[number]
        right = self._reference.newest.digests(self._reference.fragment(number))
        if (row["master_digest"], row["published_digest"]) != right:
            raise Violation(
                "weights-bits",
                f"round {number} records {row['master_digest']}, the reference gives {right[0]}",
            )

    def _check_snapshot(self, version: int, snapshot: Row, view: View) -> None:
        if version > view.version:
            raise Violation(
                "snapshot-bits", f"version {version} was saved, published is {view.version}"
            )
        right = self._reference.versions[version]
        stored = {
            "master": snapshot["master_sha256"],
            "published": snapshot["published_sha256"],
            **dict(json.loads(snapshot["slots_sha256"])),
        }
        wanted = {"master": right.master, "published": right.published, **right.slots}
        if stored.keys() != wanted.keys():
            raise Violation(
                "snapshot-bits",
                f"version {version} was saved with {sorted(stored)}, there are {sorted(wanted)}",
            )
        for name, sha256 in stored.items():
            if not os.path.exists(self._reference.path(sha256)):
                continue  # said by blob-is-there
            _, payload = self._reference.frame(sha256)
            if decode(payload, _FP32).tobytes() != wanted[name].tobytes():
                raise Violation(
                    "snapshot-bits", f"{name} of version {version} was saved with other bits"
                )

    def in_memory(self, coordinator: Coordinator, view: View, *, invariant: str) -> None:
        """The coordinator's current version is the ledger's newest, with the reference's bits."""
        current = coordinator.weights.current
        right = self._reference.versions[view.version]
        found = (current.version, current.digests.master.root, current.digests.published.root)
        if found != (view.version, right.master_digest, right.published_digest):
            raise Violation(
                invariant,
                f"in memory is {found}, the ledger has version {view.version} with "
                f"{right.master_digest}",
            )

    def restored(self, coordinator: Coordinator, view: View) -> None:
        """What a restarted coordinator hands out are the reference's bytes."""
        self.in_memory(coordinator, view, invariant="restart-equals-replay")
        spooled = coordinator.weights.frame_for(round_number=0, have_digest="")
        data = spooled.read(0, spooled.nbytes)
        payload = data[-spooled.header.payload_bytes - 32 : -32]
        right = self._reference.versions[view.version]
        if decode(payload, _FP32).tobytes() != right.published.tobytes():
            raise Violation(
                "restart-equals-replay",
                f"the weights handed out as version {view.version} are not the reference's",
            )

    def told(self, version: int, digest: str | None, view: View, *, who: str) -> None:
        """Somebody was told of a version."""
        if version > view.version:
            raise Violation(
                "published-is-recorded",
                f"{who} was told of version {version}, recorded is {view.version}",
            )
        if digest is not None:
            right = self._reference.versions[version].published_digest
            if digest != right:
                raise Violation(
                    "digest-agrees",
                    f"{who} was told that version {version} is {digest}, it is {right}",
                )

    def trains(self, who: str, *, digest: str | None, needs: int, round_number: int) -> None:
        """A worker that holds `digest` was given rows of the round, which needs a version."""
        enough = self._reference.versions[max(0, needs) : round_number]
        if not any(digest == version.published_digest for version in enough):
            raise Violation(
                "digest-agrees",
                f"{who} holds {digest} and was given rows of round {round_number}, which starts "
                f"from version {needs} or later",
            )
