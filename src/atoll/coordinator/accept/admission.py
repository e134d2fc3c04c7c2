"""What a contribution's header must say before any of its body is read."""

from dataclasses import dataclass
from functools import cached_property

from atoll.codecs.base import Codec
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.rounds import leases
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.errors import (
    Conflict,
    ContributionError,
    Forbidden,
    FrameError,
    FrameTooLarge,
    LeaseLost,
    ManifestMismatch,
    StaleContribution,
    WrongBase,
    WrongRound,
)
from atoll.layout import Layout
from atoll.ledger.records import ContributionRecord
from atoll.optim.base import MAX_NORM
from atoll.protocol import losses
from atoll.protocol.messages import Identity
from atoll.wire import frame
from atoll.wire.header import FrameHeader


@dataclass(frozen=True)
class UploadRequest:
    """What an island says before it sends a body."""

    identity: Identity
    preamble: bytes
    sha256: str
    nbytes: int
    offset: int = 0

    @cached_property
    def header(self) -> FrameHeader:
        """What the preamble says."""
        return frame.parse_preamble(self.preamble)[0]


@dataclass(frozen=True)
class Admission:
    """The checks of the accept path that need no body; from request threads, keeps nothing."""

    registry: Registry
    rounds: Rounds
    weights: RunWeights

    def expected(self, round_number: int) -> tuple[Codec, Layout]:
        """How contributions made for a round travel, and what part of the model they are."""
        upload = self.rounds.manifests.of_round(round_number).manifest.upload
        return upload.build(), self.weights.replay.carried(round_number).layout

    def receipt(self, request: UploadRequest) -> ContributionRecord | None:
        """The accepted record when these very bytes are in; Conflict when others are."""
        made_for, worker_id = request.header.round, request.identity.worker_id
        accepted = self.rounds.contribution(made_for, worker_id)
        if accepted is not None and accepted.sha256 != request.sha256:
            raise Conflict(
                f"round {made_for} already holds a contribution of {worker_id!r} with sha256 "
                f"{accepted.sha256}; {request.sha256} is refused and the first one stands"
            )
        return accepted

    def check_again(self, request: UploadRequest) -> None:
        """Checks later in an upload, when its sender may have been evicted or fenced meanwhile."""
        self.registry.check(request.identity)
        self.check(request)

    def check(self, request: UploadRequest) -> None:
        """Refuses a contribution that its sender may not send now; looks at the header alone."""
        header, payload_offset = frame.parse_preamble(request.preamble)
        if payload_offset != len(request.preamble):
            raise FrameError(
                f"the announced preamble has {len(request.preamble)} bytes where its header ends "
                f"at {payload_offset}"
            )
        self._check_identity(header, request.identity)
        self._check_round(header)
        self._check_manifest(header)
        self._check_rows(header)
        losses.check(header.loss_sum, header.tokens, of="the contribution")
        self._check_residual(header)
        codec, layout = self.expected(header.round)
        frame.expect(header, layout=layout, codec=codec, kind="contribution")
        if header.tensors is None and header.with_table(layout).tensors is not None:
            raise FrameError(
                f"tensors=None of the contribution, whose header has room for the table of all "
                f"{len(layout.tensors)}; it is left out only where the header would be too long"
            )
        exact = frame.frame_bytes(header)
        if request.nbytes != exact:
            refusal = FrameTooLarge if request.nbytes > exact else FrameError
            raise refusal(
                f"nbytes={request.nbytes} announced where this run's frame has exactly {exact}"
            )

    def _check_identity(self, header: FrameHeader, identity: Identity) -> None:
        # A persisted frame may be resent by a later incarnation of the same worker.
        made_later = (header.incarnation or 0) > identity.incarnation
        if header.worker_id != identity.worker_id or made_later:
            raise Forbidden(
                f"the frame was made by worker_id={header.worker_id!r} incarnation="
                f"{header.incarnation}, the sender is {identity.worker_id!r} incarnation="
                f"{identity.incarnation}; a worker sends its own contributions only"
            )
        self.registry.check_run_id(header.run_id)

    def _check_manifest(self, header: FrameHeader) -> None:
        right = self.rounds.manifests.of_round(header.round)
        if header.manifest_sha256 != right.sha256:
            raise ManifestMismatch(
                f"manifest_sha256={header.manifest_sha256!r} of the contribution to round "
                f"{header.round} is not {right.sha256!r}, which that round is under (version "
                f"{right.version}); fetch /info again and train the round under it"
            )

    def _check_round(self, header: FrameHeader) -> None:
        newest = self.rounds.newest
        latest = 0 if newest is None else newest.round
        if not 1 <= header.round <= latest:
            raise WrongRound(
                f"round={header.round} is not open; the latest round is {latest}; "
                f"ask for an assignment"
            )
        found = self.rounds.find(header.round)
        if found is not None and found.is_planned:
            raise WrongRound(
                f"round={header.round} is planned but not open yet; wait for a later version"
            )
        self.destination(header.round)
        carried = self.rounds.record(header.round).fragment
        if header.fragment != carried:
            raise FrameError(
                f"fragment={header.fragment} of the contribution to round {header.round}, which "
                f"carries fragment {carried}; hand in that one"
            )
        if header.first > header.round:
            raise ContributionError(
                f"first={header.first} of the contribution is after its round={header.round}; it "
                f"contains rows of no later round"
            )
        self._check_first(header)
        base = self.weights.base_digest(header.round)
        if header.base_digest != base:
            raise WrongBase(
                f"the contribution starts from weights {header.base_digest}, those before round "
                f"{header.round} are {base} (version {self.weights.current.version} is "
                f"published); download them and train again"
            )

    def _check_first(self, header: FrameHeader) -> None:
        """A row gets into each fragment once, and what a contribution contains is what it weighs.

        So it reaches back as far as the strategy says, and never past a round of the whole model.
        """
        first = self.rounds.strategy_of(header.round).first(header.round, 1)
        first = max(first, self.rounds.newest_whole(first=first, last=header.round - 1) + 1)
        if 0 < header.first < first:
            raise ContributionError(
                f"first={header.first} of the contribution to round {header.round} is before "
                f"{first}; rows of earlier rounds are in what was handed in for them"
            )

    def destination(self, made_for: int) -> int:
        """The round that a contribution made for `made_for` goes to; StaleContribution if none."""
        found = self.rounds.destination(made_for)
        if found is None:
            raise StaleContribution(
                f"round={made_for} closed without this contribution; its rows are open "
                f"again; continue from version {self.weights.current.version}"
            )
        return found

    def _check_rows(self, header: FrameHeader) -> None:
        assert header.worker_id is not None
        leased = self.rounds.leased(header.round, header.worker_id)
        leases.check_named(header, leased)
        rows = sum(lease.stop - lease.start for lease in leased)
        tokens = self.rounds.dispatch.tokens_of(leased)
        contained = tokens + self._earlier_tokens(header, header.worker_id)
        weight = self.rounds.strategy_of(header.round).weight(tokens=contained)
        if (header.rows, header.tokens, header.weight) != (rows, tokens, weight):
            raise ContributionError(
                f"rows={header.rows} tokens={header.tokens} weight={header.weight} do not fit "
                f"the lease, which counts rows={rows} tokens={tokens} weight={weight}"
            )

    def _check_residual(self, header: FrameHeader) -> None:
        upload = self.rounds.manifests.of_round(header.round).manifest.upload
        if not upload.keeps_residual and (header.residual or header.carried):
            raise ContributionError(
                f"residual={header.residual:.6g} carried={header.carried} of the contribution to "
                f"round {header.round}, whose uploads in {upload.codec!r} leave nothing behind; "
                f"leave both out"
            )
        if header.residual > MAX_NORM:
            raise ContributionError(
                f"residual={header.residual:.6g} of the contribution is above {MAX_NORM:.6g}, the "
                f"most an outer step takes; the model is unchanged; check the island's loss and "
                f"learning rate"
            )

    def _earlier_tokens(self, header: FrameHeader, worker_id: str) -> int:
        """Tokens of the earlier rounds whose rows the contribution says it contains.

        LeaseLost where the worker has lost its rows of one: they are, or will be, in another
        contribution.
        """
        tokens = 0
        for number in range(header.first or header.round, header.round):
            made = self.rounds.contribution(number, worker_id)
            if made is not None:
                tokens += made.tokens
            elif self.rounds.was_leased(number, worker_id):
                raise LeaseLost(
                    f"first={header.first} of the contribution to round {header.round}: "
                    f"{worker_id!r} handed nothing in for its rows of round {number}, so they must "
                    f"not be in it; set out from the published weights and ask for an assignment"
                )
        return tokens
