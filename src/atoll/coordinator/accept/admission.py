"""What a contribution's header must say before any of its body is read."""

from dataclasses import KW_ONLY, dataclass

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
    ManifestMismatch,
    StaleContribution,
    WrongBase,
    WrongRound,
)
from atoll.layout import Layout
from atoll.ledger.records import ContributionRecord
from atoll.protocol.messages import Identity
from atoll.strategies.base import Fragments
from atoll.versions.manifests import Manifests
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


@dataclass(frozen=True)
class Admission:
    """The checks of the accept path that need no body; from request threads, keeps nothing."""

    registry: Registry
    rounds: Rounds
    weights: RunWeights
    _: KW_ONLY
    manifests: Manifests
    fragments: Fragments
    block: int

    def expected(self, round_number: int) -> tuple[Codec, Layout]:
        """How contributions made for a round travel, and what part of the model they are."""
        recorded = self.manifests.of_round(round_number)
        fragment = self.fragments[recorded.round_strategy.fragment(round_number)]
        return recorded.manifest.upload.build(), fragment.layout

    def destination(self, made_for: int) -> int | None:
        """The round that a contribution made for `made_for` goes to now; None: it is stale."""
        return self.rounds.destination(made_for)

    def receipt(self, request: UploadRequest) -> ContributionRecord | None:
        """The accepted record when these very bytes are in; Conflict when others are."""
        header, _ = frame.parse_preamble(request.preamble)
        accepted = self.rounds.contribution(header.round, request.identity.worker_id)
        if accepted is None:
            return None
        if accepted.sha256 != request.sha256:
            raise Conflict(
                f"round {header.round} already holds a contribution of "
                f"{request.identity.worker_id!r} with sha256 {accepted.sha256}; "
                f"{request.sha256} is refused and the first one stands"
            )
        return accepted

    def check_again(self, request: UploadRequest) -> FrameHeader:
        """`check`, some time after who sends it was found good: it may be out or fenced by now."""
        self.registry.check(request.identity)
        return self.check(request)

    def check(self, request: UploadRequest) -> FrameHeader:
        """The header, if a contribution that says this may be sent now by who sends it."""
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
        codec, layout = self.expected(header.round)
        frame.expect(header, layout=layout, codec=codec, kind="contribution")
        self._check_size(header, request.nbytes)
        return header

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
        right = self.manifests.of_round(header.round)
        if header.manifest_sha256 != right.sha256:
            raise ManifestMismatch(
                f"manifest_sha256={header.manifest_sha256!r} of the contribution to round "
                f"{header.round} is not {right.sha256!r}, which that round is under (version "
                f"{right.version}); fetch /info again and train the round under it"
            )

    def _check_round(self, header: FrameHeader) -> None:
        newest = self.rounds.newest
        if newest is None or header.round > newest.round or header.round < 1:
            latest = 0 if newest is None else newest.round
            raise WrongRound(
                f"round={header.round} is not open; the latest round is {latest}; "
                f"ask for an assignment"
            )
        found = self.rounds.find(header.round)
        if found is not None and found.is_planned:
            raise WrongRound(
                f"round={header.round} is planned but not open yet; wait for a later version"
            )
        if self.destination(header.round) is None:
            raise self.stale(header.round)
        carried = self.rounds.run_strategy.fragment(header.round)
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
        base = self.weights.base_digest(header.round)
        if header.base_digest != base:
            raise WrongBase(
                f"the contribution starts from weights {header.base_digest}, those before round "
                f"{header.round} are {base} (version {self.weights.current.version} is "
                f"published); download them and train again"
            )

    def stale(self, made_for: int) -> StaleContribution:
        """The refusal of a contribution that no round takes any more."""
        return StaleContribution(
            f"round={made_for} closed without this contribution; its rows are open "
            f"again; continue from version {self.weights.current.version}"
        )

    def _check_rows(self, header: FrameHeader) -> None:
        assert header.worker_id is not None
        leased = self.rounds.leased(header.round, header.worker_id)
        leases.check_named(header, leased)
        rows = sum(lease.stop - lease.start for lease in leased)
        weight = self.rounds.strategy_of(header.round).weight(tokens=header.tokens)
        if header.rows != rows or header.tokens != rows * self.block or header.weight != weight:
            raise ContributionError(
                f"rows={header.rows} tokens={header.tokens} weight={header.weight} do not fit "
                f"the lease, which counts rows={rows} tokens={rows * self.block} weight={weight}"
            )

    def _check_size(self, header: FrameHeader, nbytes: int) -> None:
        exact = frame.frame_bytes(header)
        if nbytes > exact:
            raise FrameTooLarge(
                f"nbytes={nbytes} announced where this run's frame has exactly {exact}"
            )
        if nbytes != exact:
            raise FrameError(
                f"nbytes={nbytes} announced where this run's frame has exactly {exact}"
            )
