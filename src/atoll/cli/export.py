"""`atoll export`: weights for everybody else's tools."""

from contextlib import closing
from pathlib import Path

from atoll.cli import output
from atoll.cli.audit import opened
from atoll.cli.options import Live
from atoll.cli.s3 import s3_access
from atoll.launch import state
from atoll.proof import export as exporting
from atoll.versions import weights_file


def export(
    directory: Path,
    path: Path,
    *,
    round_number: int | None,
    published: bool,
    blob: str | None,
    live: Live,
    as_json: bool,
) -> None:
    """Writes the file and says what is in it."""
    weights_file.check_target(path)  # before a replay that may take long
    if blob is not None:  # for a directory whose ledger is lost
        addresses = state.addresses_of(directory)
        with closing(state.open_blobs(directory, addresses, s3=s3_access())) as blobs:
            metadata = exporting.export_blob(blobs, blob, path)
    else:
        with opened(directory, live) as run:
            metadata = exporting.export(
                run.ledger,
                run.blobs,
                path,
                layout=run.layout,
                version=round_number,
                published=published,
            )
    if as_json:
        output.print_json({**metadata, "path": str(path)})
        return
    output.say(
        f"wrote {str(path)!r}: {metadata['atoll.weights']} weights after round "
        f"{metadata['atoll.round']}, params digest {metadata['atoll.digest']}"
    )
