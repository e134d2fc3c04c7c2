"""Mutants of accepting a contribution: what is checked, recorded and acknowledged."""

from dataclasses import replace
from typing import Any

from atoll.blobs.drafts import DraftWriter
from atoll.coordinator.accept import admission, uploads
from atoll.coordinator.rounds import leases
from atoll.coordinator.rounds.rounds import Rounds
from atoll.errors import Conflict, LeaseLost, WrongBase
from atoll.ledger import contributions, rows, schema, sql
from atoll.wire import frame
from tests.faults.mutants.mutant import (
    Mutant,
    Patch,
    adding_to,
    answering,
    during,
    forgiving,
    having,
)

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


@mutant("acked-is-durable")
def a_receipt_is_given_before_the_commit(patch: Patch) -> None:
    real = Rounds.accept
    late: list[Any] = []

    def accept(self: Rounds, contribution: Any, header: Any) -> Any:
        for waiting in late:
            real(self, *waiting)
        late[:] = [(contribution, header)]
        return contribution

    patch.setattr(Rounds, "accept", accept)


@mutant("moves-together")
def leases_and_contribution_are_two_transactions(patch: Patch) -> None:
    def accept(self: sql.SqlLedger, contribution: Any) -> Any:
        with self._database.writing() as connection:
            first = contributions._find(connection, contribution)
            if first is not None:
                return contributions._same(first, contribution)
            contributions._finish_leases(connection, contribution)
        with self._database.writing() as connection:
            connection.execute(schema.contributions.insert(), rows.values(contribution))
        return contribution

    patch.setattr(sql.SqlLedger, "accept", accept)


@mutant("receipt-matches", having("rogue"))
def other_bytes_get_the_first_ones_receipt(patch: Patch) -> None:
    real = admission.Admission.receipt

    def receipt(self: admission.Admission, request: admission.UploadRequest) -> Any:
        try:
            return real(self, request)
        except Conflict:
            header, _ = frame.parse_preamble(request.preamble)
            return self._rounds.contribution(header.round, request.identity.worker_id)

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
    real = contributions.accept

    def accept(connection: Any, contribution: Any) -> Any:
        first = contributions._find(connection, contribution)
        if first is None:
            return real(connection, contribution)
        anew = replace(contribution, receipt=first.receipt[::-1])
        table = schema.contributions
        key = (table.c.round == first.round, table.c.worker_id == first.worker_id)
        connection.execute(table.delete().where(*key))
        connection.execute(table.insert(), rows.values(anew))
        return anew

    patch.setattr(contributions, "accept", accept)


@mutant("accepted-in-open-round")
def a_stale_round_is_accepted(patch: Patch) -> None:
    patch.setattr(admission.Admission, "_check_round", answering(None))
    patch.setattr(admission.Admission, "_check_rows", answering(None))
    patch.setattr(leases, "check_named", answering(None))
    patch.setattr(contributions, "_check_open", answering(None))
    forgiving(patch, contributions, "_finish_leases", LeaseLost)


@mutant("accepted-in-open-round", having("rogue"))
def rows_of_others_are_accepted(patch: Patch) -> None:
    real = leases.check_named
    patch.setattr(leases, "check_named", lambda header, held: held or real(header, held))


@mutant("accepted-base", having("rogue"))
def another_base_is_accepted(patch: Patch) -> None:
    forgiving(patch, admission.Admission, "_check_round", WrongBase)


@mutant("weight-by-rule", having("rogue"))
def a_weight_is_what_the_sender_says(patch: Patch) -> None:
    patch.setattr(admission.Admission, "_weight", lambda _, header: header.weight)


@mutant("blob-is-there")
def a_contribution_is_recorded_without_its_blob(patch: Patch) -> None:
    during(patch, uploads.Upload, "finish", DraftWriter, "commit", answering(None))
