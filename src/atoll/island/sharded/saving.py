"""Saves of a group's steps: written by the training, made durable and told of beside it."""

import hashlib
import logging
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from atoll.clock import Clock
from atoll.errors import AtollError
from atoll.island.driver import Over
from atoll.island.link.rank import Part
from atoll.island.sharded import source
from atoll.island.sharded.errands import Errands, Spawn
from atoll.island.sharded.source import SaveSource
from atoll.island.sharded.watch import WAIT_SECONDS, Place
from atoll.protocol.sharded import HeldSave, PartReport, SaveReport
from atoll.strategies.sharded import saves
from atoll.strategies.sharded.holding import Holding
from atoll.strategies.sharded.saves import Chunks, Draft, Notes, Saves

log = logging.getLogger(__name__)

AGAIN_SECONDS = 0.05  # until it is asked again whether all others have saved a step


@dataclass(frozen=True)
class RoundEnd:
    """What a rank tells of a round whose last step is saved."""

    round: int
    evaluation_loss: float = 0.0  # this rank's share, as a sum
    evaluation_tokens: int = 0


class Saving:
    """This rank's saves in one group. The training calls `save`; all else goes on beside it.

    One thing beside the training keeps pairs, which needs the other ranks alone; another tells the
    coordinator of them, which may be away; a third uploads, which may take long, and no step may
    wait for that to be consistent.
    """

    def __init__(
        self,
        kept: Saves,
        offered: SaveSource,
        place: Place,
        *,
        before: Holding,  # what the rank before this one holds
        clock: Clock,
        spawn: Spawn,
    ) -> None:
        self._kept = kept
        self._offered = offered
        self._place = place
        self._before = before
        self._consistent = place.formed.restore.step if place.formed.restore else 0
        self._kept_last: tuple[Draft, Chunks, Notes] | None = None
        number = place.number
        self._keeping = Errands(f"keep-{number}", clock=clock, spawn=spawn, failed=self._failed)
        self._telling = Errands(f"tell-{number}", clock=clock, spawn=spawn, failed=self._failed)
        self._handing = Errands(f"upload-{number}", clock=clock, spawn=spawn, failed=self._failed)
        self._clock = clock
        self._newest: HeldSave | None = None  # that this rank has saved in this group
        # Ends of rounds that the coordinator has not heard of: a part counts only with its save.
        self._untold: frozenset[int] = frozenset()
        self._lock = threading.Lock()  # of what is untold

    def save(
        self, step: int, own: Iterable[bytes], notes: Notes, *, ends: RoundEnd | None = None
    ) -> None:
        """Writes this rank's shard of `step`; waits only for the save before it.

        With `ends` it is also uploaded, as this rank's part of that round's checkpoint.
        """
        self._keeping.settle()
        draft = self._kept.begin(step, group=self._place.number, rank=self._place.rank, notes=notes)
        draft.write_own(own)
        self._keeping.add(lambda: self._keep(draft, notes, ends))

    def hand_in(self, step: int, ends: RoundEnd) -> None:
        """Uploads the save of `step`, which was the last one, as the part of that round."""
        self._still_to_tell(step)

        def upload() -> None:
            assert self._kept_last is not None, "a save was made before it is handed in"
            draft, chunks, notes = self._kept_last
            assert draft.step == step, (draft.step, step)
            self._hand_in(draft, chunks, notes, ends)

        self._keeping.add(upload)

    def _keep(self, draft: Draft, notes: Notes, ends: RoundEnd | None) -> None:
        """Makes the pair complete."""
        chunks = draft.finish_own()
        self._offered.offer(self._place.number, draft.step, draft.own, chunks)
        theirs, reader = (chunks, draft.own.read) if self._place.size == 1 else self._fetch(draft)
        draft.write_predecessor(theirs, reader)
        held = self._kept.complete(draft)
        self._newest = held
        if ends is not None:
            self._still_to_tell(held.step)
        self._forget()
        self._kept_last = draft, chunks, notes
        self._telling.add(lambda: self._tell(held))
        if ends is not None:
            self._hand_in(draft, chunks, notes, ends)

    def _hand_in(self, draft: Draft, chunks: Chunks, notes: Notes, ends: RoundEnd) -> None:
        part = _part(draft, chunks, self._place.number, ends.round)

        def upload() -> None:
            # A part counts only after the save that it is of: told first, uploaded beside.
            self._has_told(draft.step)
            self._handing.add(lambda: self._upload(draft.step, part, notes, ends))

        self._telling.add(upload)

    def _still_to_tell(self, step: int) -> None:
        """The coordinator has yet to hear of this round's last save, which stays until then."""
        with self._lock:
            self._untold |= {step}

    def _has_told(self, step: int) -> None:
        with self._lock:
            self._untold -= {step}

    def _fetch(self, draft: Draft) -> tuple[Chunks, saves.Reader]:
        """The hashes of the predecessor's shard, and where its bytes are read."""
        place, nbytes = self._place, self._before.nbytes
        name = source.own_name(place.number, draft.step)
        peers, rank = place.peers, (place.rank - 1) % place.size
        length = saves.encoded_bytes(nbytes)
        encoded = b"".join(peers.read(rank, name + source.CHUNKS, 0, length))
        theirs = Chunks.decoded(encoded, nbytes=nbytes)
        return theirs, lambda start, stop: peers.read(rank, name, start, stop)

    def _tell(self, held: HeldSave) -> None:
        if held not in self._kept.held:
            return  # the coordinator was away for so long that later ones took its place
        reply = self._place.talk.ask(lambda who: SaveReport(identity=who, save=held))
        self._consistent = max(self._consistent, reply.consistent)
        self._forget()

    def _forget(self) -> None:
        """Drops pairs that nobody goes back to."""
        self._kept.keep(consistent=self._consistent, group=self._place.number, also=self._untold)

    def _upload(self, step: int, part: Part, notes: Notes, ends: RoundEnd) -> None:
        """Uploads a part of a checkpoint, and waits until the checkpoint is there."""
        talk = self._place.talk
        talk.carry(lambda link, who: link.upload_part(who, part))
        is_committed = False
        while not is_committed:
            reply = talk.ask(
                lambda who: PartReport(
                    identity=who,
                    group=part.group,
                    round=part.round,
                    step=step,
                    part=part.root,
                    blob=part.sha256,
                    loss_sum=notes.loss_sum,
                    tokens=notes.tokens,
                    evaluation_loss=ends.evaluation_loss,
                    evaluation_tokens=ends.evaluation_tokens,
                    late=notes.late,
                    wait_seconds=WAIT_SECONDS,
                )
            )
            is_committed = reply.committed
        part.close()
        log.info("checkpoint committed", extra={"round": part.round, "step": step})

    def _failed(self, error: Exception) -> None:
        """A save that cannot be made would leave the next checkpoint without a part."""
        if isinstance(error, Over) or self._place.is_over:
            return
        if not isinstance(error, AtollError):
            log.error("saving met an unexpected error", exc_info=error)
        self._place.fail(error)

    @property
    def is_settled(self) -> bool:
        """Whether all pairs are complete or given up."""
        return self._keeping.is_settled

    def finish(self, *, seconds: float) -> bool:
        """Whether all that was saved is complete, consistent and uploaded; waits so long at most.

        For a rank that is about to go: afterwards nobody can read its disk.
        """
        clock = self._clock
        deadline = clock.now() + seconds
        for errands in (self._keeping, self._telling, self._handing):
            if not errands.settle(seconds=max(0.0, deadline - clock.now())):
                return False
        newest = self._newest
        if newest is None:
            return True
        talk = self._place.talk.until(lambda: clock.now() >= deadline)
        with suppress(Over, AtollError):
            # Told again, which changes nothing: the answer is whether all others have told too.
            while self._consistent < newest.step:
                reply = talk.ask(lambda who: SaveReport(identity=who, save=newest))
                self._consistent = max(self._consistent, reply.consistent)
                if self._consistent < newest.step:
                    clock.sleep(AGAIN_SECONDS)
        return self._consistent >= newest.step

    def close(self) -> None:
        """What is not begun is given up."""
        self._keeping.close()
        self._telling.close()
        self._handing.close()


def _part(draft: Draft, chunks: Chunks, group: int, number: int) -> Part:
    """The save as it is uploaded; it stays readable when the pair is dropped meanwhile."""
    opened = draft.own.opened()
    digest = hashlib.sha256()
    for piece in draft.own.read(0, chunks.nbytes):
        digest.update(piece)
    return Part(
        group=group,
        round=number,
        root=chunks.root,
        sha256=digest.hexdigest(),
        nbytes=chunks.nbytes,
        read=opened.read,
        close=opened.close,
    )
