"""A rank's part of the model between two windows, and where in the chain of artifacts it stands."""

from dataclasses import dataclass, field

from torch import Tensor

from atoll.errors import StateDamaged
from atoll.gather.archive import Recorded
from atoll.gather.artifact import FIRST


@dataclass(kw_only=True)
class Replica:
    """Changed by one window at a time, in place; all ranks of a group stand at the same one."""

    master: Tensor  # fp32 [own], of the rank's own tiles
    window: int  # the next one
    digest: str  # of all ranks' weights
    prev: str = FIRST  # sha256 of the record of the window before
    is_torn: bool = field(default=False, init=False)  # weights have moved and nothing says so

    def check(self, window: int) -> None:
        """StateDamaged unless `window` comes next and the weights are those of the one before."""
        if self.is_torn:
            raise StateDamaged(
                f"window {self.window} broke off after its weights had moved; load the weights "
                f"anew, and an artifact that is there already is applied"
            )
        if window != self.window:
            raise StateDamaged(
                f"window {window} cannot be applied to weights that wait for window {self.window}; "
                f"catch up first"
            )

    def check_follows(self, found: Recorded) -> None:
        """StateDamaged unless the record's base and predecessor are this replica's."""
        made = found.artifact
        self.check(made.window)
        for name, own in (("base_digest", self.digest), ("prev", self.prev)):
            if getattr(made, name) != own:
                raise StateDamaged(
                    f"the artifact of window {made.window} has {name}={getattr(made, name)} where "
                    f"this replica has {own}; the chain forks here, so start from weights of "
                    f"the chain that the run follows"
                )

    def tear(self) -> None:
        """From now on the weights are those of no window, until `advance`."""
        self.is_torn = True

    def advance(self, digest: str, prev: str) -> None:
        """The weights are those after the window, on all ranks."""
        self.window, self.digest, self.prev = self.window + 1, digest, prev
        self.is_torn = False
