"""Mutants of accepting a contribution: what is checked, recorded and acknowledged."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from atoll.blobs.base import BlobWriter
from atoll.coordinator.accept import admission, uploads
from atoll.coordinator.rounds import leases
from atoll.coordinator.rounds.rounds import Rounds
from atoll.errors import Conflict, LeaseLost, WrongBase
from atoll.ledger.records import ContributionRecord
from atoll.ledger.tables import contributions, rows
from atoll.ledger.tables.contributions import ContributionTable
from atoll.ledger.tables.leases import LeaseTable
from atoll.simulate.faults.scenario import Scenario
from atoll.wire import frame
from atoll.wire.header import FrameHeader
from tests.faults.mutants.mutant import (
    RELAY,
    Mutant,
    Patch,
    adding_to,
    answering,
    during,
    feeding,
    forgiving,
    having,
    in_two,
    lacking,
)

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


@mutant("acked-is-durable")
def a_receipt_is_given_before_the_commit(patch: Patch) -> None:
    real = Rounds.accept
    late: list[Any] = []

    def accept(self: Rounds, contribution: Any, header: Any, announcement: Any = None) -> Any:
        for waiting in late:
            real(self, *waiting)
        late[:] = [(contribution, header, announcement)]
        return contribution

    patch.setattr(Rounds, "accept", accept)


@mutant("moves-together")
def leases_and_contribution_are_two_transactions(patch: Patch) -> None:
    in_two(patch, rows, "values", within=(ContributionTable, "accept"))


@mutant("receipt-matches", having("rogue"))
def other_bytes_get_the_first_ones_receipt(patch: Patch) -> None:
    real = admission.Admission.receipt

    def receipt(self: admission.Admission, request: admission.UploadRequest) -> Any:
        try:
            return real(self, request)
        except Conflict:
            header, _ = frame.parse_preamble(request.preamble)
            return self.rounds.contribution(header.round, request.identity.worker_id)

    patch.setattr(admission.Admission, "receipt", receipt)


@mutant("receipt-matches", having("duplicate"))
def a_repeated_upload_gets_another_receipt(patch: Patch) -> None:
    real = admission.Admission.receipt

    def receipt(self: Any, request: Any) -> Any:
        found = real(self, request)
        return None if found is None else replace(found, receipt=found.receipt[::-1])

    patch.setattr(admission.Admission, "receipt", receipt)


@mutant("acked-is-durable", having("duplicate"))
def a_repeated_upload_is_recorded_anew(patch: Patch) -> None:
    patch.setattr(admission.Admission, "receipt", answering(None))
    real = ContributionTable.accept

    def accept(self: ContributionTable, contribution: Any) -> Any:
        first = self.get(contribution.round, contribution.worker_id)
        if first is None:
            return real(self, contribution)
        anew = replace(contribution, receipt=first.receipt[::-1])
        key = (first.round, first.worker_id)
        self._connection.change(
            "UPDATE contributions SET receipt = ? WHERE round = ? AND worker_id = ?",
            (anew.receipt, *key),
        )
        return anew

    patch.setattr(ContributionTable, "accept", accept)


@mutant("accepted-in-open-round", lacking("rogue"))
def a_stale_round_is_accepted(patch: Patch) -> None:
    patch.setattr(Rounds, "destination", lambda _, made_for: made_for)
    patch.setattr(admission.Admission, "_check_rows", answering(None))
    patch.setattr(leases, "check_named", answering(None))
    patch.setattr(contributions, "_check_open", answering(None))
    forgiving(patch, LeaseTable, "finish", LeaseLost)


@mutant("accepted-in-open-round", having("rogue"))
def rows_of_others_are_accepted(patch: Patch) -> None:
    real = leases.check_named
    patch.setattr(leases, "check_named", lambda header, held: held or real(header, held))


@mutant("accepted-base", having("rogue"))
def another_base_is_accepted(patch: Patch) -> None:
    forgiving(patch, admission.Admission, "_check_round", WrongBase)


@mutant("accepted-in-open-round", size=RELAY)
def a_contribution_is_folded_by_the_newest_open_round(patch: Patch) -> None:
    patch.setattr(Rounds, "destination", lambda self, _: self.open_rounds[-1].number)


@mutant("accepted-as-sent", size=RELAY)
def every_contribution_is_recorded_as_of_the_first_fragment(patch: Patch) -> None:
    _recording(patch, lambda made: replace(made, fragment=0))


@mutant("accepted-as-sent", size=RELAY)
def a_contribution_is_recorded_with_rows_of_its_own_round_only(patch: Patch) -> None:
    _recording(patch, lambda made: replace(made, first=made.round))


@mutant("accepted-as-sent", feeding())
def what_a_contribution_leaves_behind_is_not_recorded(patch: Patch) -> None:
    _recording(patch, lambda made: replace(made, residual=0.0))


@mutant("accepted-as-sent", feeding())
def what_a_contribution_carries_is_not_recorded(patch: Patch) -> None:
    _recording(patch, lambda made: replace(made, carried=0))


def _recording(patch: Patch, changed: Callable[[ContributionRecord], ContributionRecord]) -> None:
    real = uploads.Uploads._contribution
    patch.setattr(uploads.Uploads, "_contribution", lambda *args: changed(real(*args)))


def _claims_more(scenario: Scenario) -> bool:
    """A frame that claims more rows than it has weighs as much as others."""
    return scenario.has("rogue") and scenario.settings["weighting"] == "equal"


@mutant("pair-counted-once", _claims_more)
def rows_that_have_counted_in_a_fragment_count_again(patch: Patch) -> None:
    patch.setattr(admission.Admission, "_check_first", answering(None))


@mutant("weight-by-rule", having("rogue"))
def a_weight_is_what_the_sender_says(patch: Patch) -> None:
    real = admission.Admission._check_rows

    def check_rows(self: admission.Admission, header: FrameHeader) -> None:
        right = self.rounds.strategy_of(header.round).weight(tokens=header.tokens)
        real(self, replace(header, weight=right))

    patch.setattr(admission.Admission, "_check_rows", check_rows)


@mutant("blob-is-there")
def a_contribution_is_recorded_without_its_blob(patch: Patch) -> None:
    during(patch, uploads.Upload, "finish", BlobWriter, "commit", answering(None))
