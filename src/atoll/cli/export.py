"""`atoll export`: weights for everybody else's tools."""

from contextlib import closing

from atoll.cli import output
from atoll.cli.audit import opened
from atoll.cli.options import ExportOptions
from atoll.cli.s3 import s3_access
from atoll.launch import state
from atoll.proof import export as exporting
from atoll.versions import weights_file


def export(options: ExportOptions) -> None:
    """Writes the file and says what is in it."""
    path, directory = options.output, options.directory
    weights_file.check_target(path)  # before a replay that may take long
    if options.blob is not None:  # for a directory whose ledger is lost
        addresses = state.addresses_of(directory)
        with closing(state.open_blobs(directory, addresses, s3=s3_access())) as blobs:
            metadata = exporting.export_blob(blobs, options.blob, path)
    else:
        with opened(options) as run:
            metadata = exporting.export(
                run.ledger,
                run.blobs,
                path,
                layout=run.layout,
                version=options.round_number,
                published=options.published,
            )
    if options.as_json:
        output.print_json({**metadata, "path": str(path)})
        return
    output.say(
        f"wrote {str(path)!r}: {metadata['atoll.weights']} weights after round "
        f"{metadata['atoll.round']}, params digest {metadata['atoll.digest']}"
    )
