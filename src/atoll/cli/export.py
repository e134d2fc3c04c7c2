"""`atoll export`: weights for everybody else's tools."""

from pathlib import Path

from atoll.cli import output
from atoll.cli.audit import Live, opened
from atoll.history import export as exporting
from atoll.history import weights_file


def export(
    directory: Path,
    path: Path,
    *,
    round_number: int | None,
    published: bool,
    live: Live,
    as_json: bool,
) -> None:
    """Writes the file and says what is in it."""
    weights_file.check_target(path)  # before a replay that may take long
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
