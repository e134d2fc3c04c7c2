"""Old artifacts go: those that nobody needs to get from the newest whole weights to the newest.

A record goes before its body and the weights after it, so no record ever names what is gone; a late
joiner in the middle of it finds a gap, or a body missing, and begins again behind the weights.
"""

from atoll.errors import ConfigError, ObjectMissing
from atoll.gather.archive import Archive
from atoll.gather.artifact import Artifact


def remove_old(archive: Archive, keep: int) -> tuple[int, ...]:
    """Removes what is older than `keep` windows; the windows that were removed.

    The window whose whole weights are the newest stays, and all after it: its record names them.
    Without whole weights in the archive nothing goes: all start from the first window. Bodies and
    weights that no record names go with them, also those that an earlier call did not come to. The
    group alone writes to its archive, and calls this between two windows.
    """
    if keep < 1:
        raise ConfigError(f"keep_artifacts={keep} must be 1 or more: the newest has to stay")
    windows = archive.windows()
    if len(windows) <= keep:
        return ()
    newest = _newest_whole(archive, windows)
    gone = [window for window in windows[:-keep] if newest is not None and window < newest]
    if not gone:
        return ()
    for window in gone:
        archive.remove_record(window)
    kept = [_found(archive, window) for window in windows if window not in gone]
    archive.remove_but(
        bodies={made.body_sha256 for made in kept}, weights={made.digest for made in kept}
    )
    return tuple(gone)


def _newest_whole(archive: Archive, windows: list[int]) -> int | None:
    """The newest window after which whole weights are there."""
    for window in reversed(windows):
        if archive.has_weights(_found(archive, window).digest):
            return window
    return None


def _found(archive: Archive, window: int) -> Artifact:
    found = archive.find(window)
    if found is None:
        raise ObjectMissing(f"the record of window {window} was listed and is gone")
    return found.artifact
