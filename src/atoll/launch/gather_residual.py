"""What a peer's codec has dropped, from window to window, in a file beside its key.

    before   bf16, what was there before the window
    after    bf16, what is left once the window's frame is published
    the window and the sha256 of its frame

It is written, durably, before the statement exists. Which of both counts is what the peer's own
bucket says: `after` where the statement of that very frame stands, else `before`. So a crash
anywhere neither loses a residual nor adds it twice.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll import files
from atoll.errors import ConfigError, Conflict, StateDamaged, StoreError
from atoll.gather.statement import Statement


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """A window's residuals."""

    owner: str  # run and uid
    window: int
    sha256: str  # of the window's frame
    before: Tensor  # bf16 [elements]
    after: Tensor  # bf16 [elements]

    def write(self, path: Path) -> None:
        """Puts both at `path`, durably, whole or not at all."""
        part = files.part_of(path)
        told = {"owner": self.owner, "window": str(self.window), "sha256": self.sha256}
        try:
            save_file({"before": self.before, "after": self.after}, str(part), metadata=told)
            files.put_in_place(part, path)
        except (OSError, SafetensorError) as exc:
            raise StoreError(f"cannot write the residual to {str(path)!r}: {exc}") from exc
        finally:
            part.unlink(missing_ok=True)


def read(path: Path, *, owner: str, elements: int) -> Kept | None:
    """What `write` put there; None where nothing is. ConfigError for another's file."""
    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            told = file.metadata() or {}
            found = Kept(
                owner=told.get("owner", ""),
                window=int(told.get("window", "")),
                sha256=told.get("sha256", ""),
                before=file.get_tensor("before"),
                after=file.get_tensor("after"),
            )
    except (OSError, SafetensorError, ValueError) as exc:
        raise ConfigError(f"{str(path)!r} is no residual of a peer: {exc}") from exc
    shapes = {(one.dtype, tuple(one.shape)) for one in (found.before, found.after)}
    if found.owner != owner or shapes != {(torch.bfloat16, (elements,))}:
        raise ConfigError(
            f"{str(path)!r} is the residual of {found.owner!r} with {found.before.numel()} "
            f"elements, not of {owner!r} with {elements}; name its own file"
        )
    return found


def taken_in(kept: Kept | None, *, window: int, stated: Statement | None) -> Tensor | None:
    """The residual that goes into `window`'s frame; None where there is none yet.

    `stated` is what the peer's bucket has for the window of `kept`.
    """
    if kept is None:
        return None
    if kept.window > window:
        raise StateDamaged(
            f"the residual is of window {kept.window}, the peer's weights wait for window "
            f"{window}; catch up first"
        )
    is_sent = stated is not None and stated.sha256 == kept.sha256
    return kept.after if kept.window < window and is_sent else kept.before


def check_unstated(stated: Statement | None, *, window: int, sha256: str) -> None:
    """Conflict where another frame was stated for the window: its residual is the one that counts.

    Asked before a residual is written; `publish` asks again before it states.
    """
    if stated is not None and stated.sha256 != sha256:
        raise Conflict(
            f"window {window} is stated already, with the frame {stated.sha256}; a window is "
            f"stated once, so give the displacement that it was made of, or wait for the next"
        )
