"""Starts the production code on what a power cut left and holds it to what was promised before."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.faults.power import gatherers, machines
from tests.faults.power.check_coordinator import check_coordinator
from tests.faults.power.check_damaged import check_repaired, check_reset
from tests.faults.power.check_gather import GathererCheck, check_bucket
from tests.faults.power.check_machines import IslandCheck, check_addresses, check_blobs, check_kept
from tests.faults.power.check_rank import RankCheck
from tests.faults.power.images import Image
from tests.faults.power.promises import Broken, Mark, same

Check = Callable[[Path, Sequence[Mark]], None]


class Checker:
    """Knows everything that the recorded run ever said."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self.final_digest = next(m["finished"] for m in marks if "finished" in m)
        self.gathered_digest = next(m["gathered"] for m in marks if "gathered" in m)
        self._checks: dict[str, Check] = {
            "coordinator": check_coordinator,
            **{name: IslandCheck(name, marks) for name in machines.ISLANDS},
            "rank": RankCheck(marks),
            "gatherer": GathererCheck(marks),
            "bucket": check_bucket,
            "operator": check_kept,
            "store": check_blobs,
            "elsewhere": check_addresses,
            "repaired": check_repaired,
            "reset": check_reset,
        }
        assert {m["machine"] for m in marks} == set(self._checks), "each machine promises something"
        self._sound: set[tuple[str, str, int]] = set()

    def check(self, image: Image, promised: Sequence[Mark], *, scratch: Path) -> None:
        """Raises Broken unless every promise holds on the image; makes `scratch`.

        Machines do not see each other's disks, so one that was found sound with the same promises
        is not started again.
        """
        for name, check in self._checks.items():
            own = [mark for mark in promised if mark["machine"] == name]
            key = (name, image.digest(name), len(own))
            if key not in self._sound:
                image.write(scratch, only=name)
                with naming(name):
                    check(scratch, own)
                self._sound.add(key)

    def complete(self, image: Image, *, scratch: Path) -> None:
        """Raises Broken unless the run goes on to the weights of the undisturbed one."""
        image.write(scratch)
        with naming("the continued run"):
            same("final params digest", machines.run(scratch).digest, self.final_digest)
        with naming("the continued gather"):
            found = gatherers.run(scratch, gatherers.Unmarked())
            same("digest after the last window", found, self.gathered_digest)

    @property
    def started(self) -> int:
        """On how many different disks of single machines the production code was started."""
        return len(self._sound)


@contextmanager
def naming(part: str) -> Iterator[None]:
    """A refusal to start, or to read what was promised, is a broken promise too."""
    try:
        yield
    except Exception as error:
        raise Broken(f"{part}: {type(error).__name__}: {error}") from error
