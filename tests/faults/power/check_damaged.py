"""A damaged state directory that is repaired, and one that is put aside, after a power cut."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from atoll.launch import repair, state
from atoll.launch.state import Addresses
from atoll.wire import certificate
from tests.faults.power import machines
from tests.faults.power.promises import Broken, Mark, same, sha256_of, values
from tests.ledgers import alone

NOW = datetime.datetime.fromtimestamp(machines.WALL, tz=datetime.UTC)
LEDGER = "ledger.sqlite"


def check_repaired(root: Path, promised: Sequence[Mark]) -> None:
    """A repair that was cut off can be taken up, one that was told has lasted; nothing is gone."""
    home = root / machines.REPAIRED
    is_told = any(values(promised, "repaired"))
    for mark in (mark for mark in promised if "damaged" in mark):
        if not is_told:
            report = repair.repair(home)
            same("last good round", report.last_good, mark["damaged"])
        with state.held(home, Addresses()) as stores:
            same("what the log held", alone(stores.ledger).control.all().get("kept"), mark["kept"])
            latest = alone(stores.ledger).rounds.all()[-1]
            same("digest of the newest round", latest.master_digest, mark["digest"])
    for mark in promised:
        for name, expected in mark["aside"].items():
            if expected not in {sha256_of(path) for path in home.glob(f"damaged-*/{name}")}:
                raise Broken(f"{name} as it was before the repair is nowhere")


def check_reset(root: Path, promised: Sequence[Mark]) -> None:
    """The old run is whole in one place, and a new one keeps the old certificate."""
    home = root / machines.RESET
    dropped = next(values(promised, "dropped"), None)
    for mark in (mark for mark in promised if "told" in mark):
        if dropped is None:
            places = [home, *home.parent.glob(f"{home.name}.dropped-*")]
            [place] = [path for path in places if (path / LEDGER).exists()]
        else:
            place = home.with_name(dropped)
            same("what a new run finds", sorted(p.name for p in home.iterdir()), mark["keys"])
            kept = certificate.own(home, host="127.0.0.1", now=NOW)
            same("fingerprint", kept.fingerprint, mark["pinned"])
        with state.at_rest(place) as (ledger, _):
            same("the old run", ledger.state_hash(), mark["told"])
