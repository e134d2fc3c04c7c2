"""A state directory belongs to one user, and nothing in it leads out of it.

Whoever else could write there could plant a link, and what is written, emptied or removed by its
name would be somebody's files. Asked once, when a directory is taken: after that nobody but its
owner can change what was found.
"""

import os
import stat
from pathlib import Path

from atoll.errors import StateUnsafe, StoreError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH


def check(directory: Path, *, option: str = "--dir") -> None:
    """StateUnsafe names what is not this user's, can be written by others, or is a link.

    `option` is how another directory is given. The directory may be reached through links of this
    user or of root. Nothing is changed.
    """
    check_way(directory)
    try:
        found = directory.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(0, "not a directory")
        _check_owner(directory, found)
        _check_mode(directory, found)
        _check_inside(directory, top=True, reachable=bool(found.st_mode & _OTHERS_ENTER))
    except OSError as exc:
        rule = f"it must be a directory that can be written to, so choose another {option}"
        raise StoreError(f"{str(directory)!r} cannot be used ({exc.strerror}); {rule}") from exc


def check_place(directory: Path) -> None:
    """StateUnsafe for a directory of another user or that others can write to; not what is in it.

    For one that this program makes state directories in. One that is missing is nobody's.
    """
    check_way(directory)
    if directory.is_dir():
        found = directory.stat()
        _check_owner(directory, found)
        _check_mode(directory, found)


def check_way(directory: Path) -> None:
    """StateUnsafe for a link of another user on the way to `directory`, which may be missing."""
    here = directory.absolute()
    for place in (here, *here.parents):
        try:
            found = place.lstat()
        except OSError:
            continue  # whoever opens it says so
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), 0):
            raise StateUnsafe(
                f"{str(place)!r} is a symbolic link of user {found.st_uid}, not of this one "
                f"({os.geteuid()}), who may point it elsewhere; give the directory by another path"
            )


def _check_inside(directory: Path, *, top: bool, reachable: bool) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            path = directory / entry.name
            if entry.is_symlink():
                raise StateUnsafe(
                    f"{str(path)!r} is a symbolic link, and no link is followed in a state "
                    f"directory; see who put it there and remove it, or mount what it leads to"
                )
            is_folder = entry.is_dir(follow_symlinks=False)
            # Deeper files are left alone: there may be a million, and blobs vouch for themselves.
            if is_folder or top:
                found = entry.stat(follow_symlinks=False)
                _check_owner(path, found)
                if reachable:
                    _check_mode(path, found)
            if is_folder:
                _check_inside(path, top=False, reachable=reachable)


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise StateUnsafe(
            f"{str(path)!r} belongs to user {found.st_uid}, this process runs as {os.geteuid()}; "
            f"a state directory and what is in it must be its user's own: run as that user, give "
            f"another directory, or `chown -R` it"
        )


def _check_mode(path: Path, found: os.stat_result) -> None:
    if found.st_mode & _OTHERS_WRITE:
        raise StateUnsafe(
            f"{str(path)!r} has mode {stat.S_IMODE(found.st_mode):04o}: others than its owner can "
            f"write there and plant links; see that nobody did, then `chmod -R go-w` the state "
            f"directory, or give another"
        )
