"""What makes an artifact true whoever signed it: its peers' own signatures and bytes.

The record carries every applied peer's statement, the body its frame but for the checksum. So each
frame is rebuilt, and the one validator says whether it is what its peer signed for this window; the
norms that decided the factors fall out again. What stays the emitter's word: whom it left out.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from atoll.errors import FrameError
from atoll.gather import statement as statements
from atoll.gather.artifact import Artifact
from atoll.gather.body import BodySlices
from atoll.gather.keys import PublicKey
from atoll.gather.partial import Accepted
from atoll.gather.statement import Statement
from atoll.gather.supports import CODEC
from atoll.gather.validate import Expected, Validator
from atoll.gather.words import Skip
from atoll.layout import Layout
from atoll.optim.base import MAX_NORM
from atoll.wire.frame import Hashing


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What a replica knows by itself and holds every record to."""

    keys: Mapping[str, PublicKey]  # of all peers that ever were in the run, by uid
    weights: Mapping[str, int] = field(default_factory=dict)  # by uid; 1 for the others
    norm_bound: float = MAX_NORM

    def check_record(self, made: Artifact, layout: Layout) -> None:
        """FrameError unless each applied peer has the run's weight and has signed for the window.

        Needs no body: a forged record is refused before its body is asked for.
        """
        for one, weight in zip(made.accepted, made.weights, strict=True):
            if weight != self.weights.get(one.uid, 1):
                raise FrameError(
                    f"the artifact of window {made.window} has weight {weight} for {one.uid!r} "
                    f"where the run has {self.weights.get(one.uid, 1)}; nothing of it was applied"
                )
            self._validator(made, one, layout)

    def check_frames(
        self, made: Artifact, body: BodySlices, layout: Layout, *, rows: Collection[int]
    ) -> None:
        """FrameError unless the frames of these `rows` of `accepted` are what their peers signed.

        Reads the body once; holds some groups of it, and a tile's bytes of each of `rows`.
        """
        sums = {row: Hashing() for row in rows}
        checks = {
            row: self._validator(made, made.accepted[row], layout, tee=sums[row]) for row in rows
        }
        for row, check in checks.items():
            with _refusing(made):
                check.feed(body.preamble(made.accepted[row].uid))
        for block in body.blocks() if checks else ():
            for row, check in checks.items():
                with _refusing(made):
                    check.feed(block[row].data)
        for row, check in checks.items():
            one = made.accepted[row]
            with _refusing(made):
                check.feed(bytes.fromhex(sums[row].digest()))
                found = check.finish()
            if (found.sha256, found.nbytes, found.payload_start, found.squares) != (
                one.sha256,
                one.nbytes,
                one.payload_start,
                one.squares,
            ):
                raise FrameError(
                    f"the artifact of window {made.window} says of {one.uid!r} what its object "
                    f"does not give (sha256, size or norms); nothing of it was applied"
                )

    def _validator(
        self, made: Artifact, one: Accepted, layout: Layout, *, tee: Hashing | None = None
    ) -> Validator:
        if one.uid not in self.keys:
            raise FrameError(
                f"the artifact of window {made.window} has {one.uid!r}, whose key is not known "
                f"here; where it was a peer of the run, list its key under [former]"
            )
        expected = Expected(
            run_id=made.run_id,
            manifest_sha256=made.manifest_sha256,
            uid=one.uid,
            window=made.window,
            base_digest=made.base_digest,
            layout=layout,
            codec=CODEC,
            norm_bound=self.norm_bound,
        )
        with _refusing(made):
            stated = statements.read(one.statement.encode(), self.keys[one.uid])
            _check_same(one, stated)
            return Validator(expected, stated, tee=tee)


def _check_same(one: Accepted, stated: Statement) -> None:
    if (one.sha256, one.nbytes) != (stated.sha256, stated.nbytes):
        raise FrameError(
            f"{one.uid!r} signed an object of {stated.nbytes} bytes with the sha256 "
            f"{stated.sha256}, not one of {one.nbytes} with {one.sha256}"
        )


@contextmanager
def _refusing(made: Artifact) -> Iterator[None]:
    """What a peer would be skipped for is a lie of whoever signed the record."""
    try:
        yield
    except (Skip, FrameError) as exc:
        raise FrameError(
            f"the artifact of window {made.window} holds what its peers did not sign: {exc}; "
            f"nothing of it was applied, see who writes to the archive and has the group's key"
        ) from exc
