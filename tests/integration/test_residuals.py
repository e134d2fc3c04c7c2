"""What a contribution states of the residual it leaves and carries; what the audit makes of it.

Real islands on a virtual clock. The reference decodes the stored frames and repeats error feedback
from what was trained, beside the code that states the norm.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from atoll.blobs.base import Blobs
from atoll.cli.app import app
from atoll.errors import ContributionError, CoordinatorUnreachable, FrameError, NotFinite
from atoll.island.conversation import hand_in
from atoll.island.conversation.hand_in import Fresh
from atoll.island.state import encoding
from atoll.island.state.encoding import Encoded
from atoll.island.state.weights import Staged
from atoll.layout import Fragment, Span
from atoll.ledger.records import ContributionRecord
from atoll.proof.residuals import LostResidual
from atoll.wire import frame
from atoll.wire.header import FrameHeader
from tests import clusters
from tests.clusters import Cluster
from tests.integration.test_resume import FAULTS, late
from tests.integration.test_resume_asynchronous import APART
from tests.integration.test_resume_streaming import STREAMING
from tests.ledgers import alone
from tests.seas import Call, Killed, Sea

SYNC: dict[str, Any] = {"stop.rounds": 4}
RUNS: dict[str, dict[str, Any]] = {
    "bf16": SYNC,
    "int8": {**SYNC, "upload.codec": "int8"},
    "topk with decay": {**SYNC, "upload.codec": "topk", "upload.decay": 0.95},
    "two fragments": STREAMING,
    "two fragments in int4": {**STREAMING, "upload.codec": "int4"},
    "asynchronous": APART,
}


class Watched(Sea):
    """A sea that is asked about its contributions."""

    @property
    def lost(self) -> list[LostResidual]:
        return self.report.residuals

    def of(self, worker_id: str) -> list[ContributionRecord]:
        """What an island contributed, oldest first."""
        mine = [c for c in self.made if c.worker_id == worker_id]
        return sorted(mine, key=lambda c: c.round)

    def stated(self) -> dict[tuple[str, int], tuple[float, int]]:
        return {(c.worker_id, c.round): (c.residual, c.carried) for c in self.made}

    def header(self, made: ContributionRecord) -> FrameHeader:
        with self.stores.blobs.open(made.sha256) as reader:
            return frame.read_preamble(reader)[0]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Fragment, int, Tensor]]:
    """By the frame's sha256: the fragment, the size of the model, and the displacement itself."""
    found: dict[str, tuple[Fragment, int, Tensor]] = {}
    real = encoding.encode

    def encode(staged: Staged, *args: Any, **more: Any) -> Encoded:
        values = staged.tile(Span(0, staged.fragment.layout.size)).clone()
        encoded: Encoded = real(staged, *args, **more)
        found[encoded.sha256] = (staged.fragment, staged.size, values)
        return encoded

    monkeypatch.setattr(encoding, "encode", encode)
    return found


def payload_of(blobs: Blobs, sha256: str) -> Tensor:
    with blobs.open(sha256) as reader:
        header, offset = frame.read_preamble(reader)
        data = reader.read(offset, header.payload_bytes)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def norms(sea: Watched, trained: dict[str, tuple[Fragment, int, Tensor]]) -> Iterator[float]:
    """What each contribution of the run must have left, in the order of `made`."""
    upload = sea.manifest.upload
    codec = upload.build()
    residuals: dict[str, Tensor] = {}
    for made in sorted(sea.made, key=lambda c: c.round):
        fragment, size, values = trained[made.sha256]
        residual = residuals.setdefault(made.worker_id, torch.zeros(size))
        wanted = values + fragment.of(residual) * upload.residual_decay
        arrived = codec.decode(payload_of(sea.stores.blobs, made.sha256), len(fragment.span))
        fragment.of(residual).copy_((wanted - arrived).bfloat16())
        yield math.sqrt(math.fsum(value * value for value in residual.tolist()))


# What is stated


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_contribution_states_the_norm_of_what_its_island_holds_back_after_it(
    tmp_path, trained, changes
):
    """Of the whole model, also where one fragment of it is handed in."""
    sea = Watched(tmp_path, **changes)

    sea.run()

    stated = [c.residual for c in sorted(sea.made, key=lambda c: c.round)]
    assert stated == pytest.approx(list(norms(sea, trained)), rel=1e-12)
    assert min(stated) > 0


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_contribution_names_the_one_before_it_in_a_calm_run(tmp_path, changes):
    sea = Watched(tmp_path, **changes)

    sea.run()

    for name in ("a", "b"):
        rounds = [c.round for c in sea.of(name)]
        assert [c.carried for c in sea.of(name)] == [0, *rounds[:-1]]


def test_record_says_what_the_stored_frame_says(tmp_path):
    sea = Watched(tmp_path, **SYNC)

    sea.run()

    headers = [sea.header(made) for made in sea.made]
    assert [(h.residual, h.carried) for h in headers] == [(c.residual, c.carried) for c in sea.made]


@pytest.mark.parametrize(
    "changes", [{"upload.codec": "fp32"}, {"upload.error_feedback": False}], ids=str
)
def test_contribution_that_leaves_nothing_states_nothing(tmp_path, changes):
    sea = Watched(tmp_path, **SYNC, **changes)

    sea.run()

    assert set(sea.stated().values()) == {(0.0, 0)}
    spelled = json.loads(sea.header(sea.made[0]).to_json())
    assert spelled.keys().isdisjoint({"residual", "carried"})
    assert sea.lost == []


@pytest.mark.parametrize("changes", [SYNC, STREAMING], ids=["sync", "streaming"])
@pytest.mark.parametrize(
    "name",
    [
        *("killed in training", "killed before an upload", "killed before the receipt"),
        *("every receipt is lost", "evicted before an upload"),
        "coordinator restarts before a receipt",
    ],
)
def test_contribution_sent_again_states_the_same(tmp_path, changes, name):
    calm, sea = Watched(tmp_path / "calm", **changes), Watched(tmp_path / "sea", **changes)
    sea.faults = FAULTS[name]

    calm.run()
    sea.run()

    assert sea.stated() == calm.stated()


@pytest.mark.parametrize("upload", [1, 2])
def test_island_that_was_refused_carries_what_its_last_accepted_one_left(tmp_path, upload):
    """Nothing, where the first one is refused."""
    sea = Watched(
        tmp_path,
        **{
            "stop.rounds": 5,
            "membership.min_workers": 1,
            "membership.quorum": 1,
            "membership.grace_seconds": 1.0,
        },
    )
    sea.faults = {("b", "upload", upload): late}

    sea.run()

    rounds = [c.round for c in sea.of("b")]
    assert sea.stale["b"] == 1 and rounds != list(range(1, len(rounds) + 1))
    assert [c.carried for c in sea.of("b")] == [0, *rounds[:-1]]


def test_displacement_that_is_not_finite_is_named_by_the_island_and_not_sent(tmp_path, monkeypatch):
    sea = Watched(tmp_path, **SYNC)
    real = hand_in.prepare

    def prepare(*args: Any, **more: Any) -> Fresh:
        made = real(*args, **more)
        staged = made.staged
        return replace(made, staged=replace(staged, tile=lambda span: staged.tile(span) / 0))

    monkeypatch.setattr(hand_in, "prepare", prepare)

    with pytest.raises(NotFinite, match="residual=nan of the contribution to round 1"):
        sea.run()

    assert sea.calls["a", "upload"] + sea.calls["b", "upload"] == 0


# What is refused


@pytest.fixture
def lossy(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, {"upload.codec": "int8"})
    yield made
    made.close()


def test_norm_that_no_outer_step_could_take_is_refused(lossy):
    a, _ = lossy.pair()

    with pytest.raises(ContributionError, match=r"residual=2e\+18 .* is above 1e\+18"):
        a.send(a.frame(residual=2e18))

    assert alone(lossy.ledger).contributions.of_round(1) == []


@pytest.mark.parametrize(("name", "value"), [("residual", 0.5), ("carried", 1)])
def test_residual_of_uploads_that_leave_nothing_is_refused(tmp_path, name, value):
    cluster = Cluster(tmp_path, {"upload.codec": "fp32"})
    a, _ = cluster.pair()

    with pytest.raises(ContributionError, match=rf"{name}={value}.* leave nothing behind"):
        a.send(a.frame(**{name: value}))

    assert alone(cluster.ledger).contributions.of_round(1) == []


@pytest.mark.parametrize(
    ("spelled", "says"),
    [
        (b"NaN", "NaN; numbers must be finite"),
        (b"Infinity", "Infinity; numbers must be finite"),
        (b"-0.5", "residual=-0.5 must be"),
        (b'"0.5"', "residual='0.5' must be"),
    ],
)
def test_norm_that_is_none_is_refused_before_any_body_is_read(lossy, spelled, says):
    a, _ = lossy.pair()
    sent = a.frame(residual=0.5)
    text = sent.preamble[frame.FIXED_BYTES :].replace(b'"residual":0.5', b'"residual":' + spelled)
    fixed = sent.preamble[: frame.FIXED_BYTES - 4] + len(text).to_bytes(4, "little")

    with pytest.raises(FrameError, match=says):
        a.send(sent, preamble=fixed + text)

    assert lossy.coordinator.status().bytes_received == 0


# What the audit lists


def erased(sea: Sea, _: Call) -> Any:
    """The island dies, and its state directory with it."""
    for path in (sea.home / "a").glob("*-[0-9]*"):
        shutil.rmtree(path)
    raise Killed


@pytest.mark.parametrize("changes", [SYNC, STREAMING], ids=["sync", "streaming"])
def test_audit_lists_who_returned_without_its_residual(tmp_path, changes):
    sea = Watched(tmp_path, **changes)
    sea.faults = {("a", "step", 6): erased}

    sea.run()

    [lost] = [found for found in sea.lost if found.next is not None]
    left, later = next((x, y) for x, y in pairwise(sea.of("a")) if not y.carried)
    assert lost == LostResidual("a", left.round, left.residual, next=later.round)
    assert later.round > left.round and left.residual > 0


def test_audit_lists_what_a_manifest_without_loss_made_islands_drop(tmp_path):
    """A lossless codec has nothing to add a residual to; the islands say that they carry none."""
    sea = Watched(tmp_path, **SYNC)

    def changed(sea: Sea, _: Call) -> Any:
        sea.restart(**{"upload.codec": "fp32"})
        raise CoordinatorUnreachable

    sea.faults = {("a", "upload", 2): changed}

    sea.run()

    kept = {name: [c for c in sea.of(name) if c.residual] for name in ("a", "b")}
    assert {len(made) for made in kept.values()} == {2}  # the change counts from round 3 on
    wanted = [LostResidual(n, 2, made[-1].residual, next=3) for n, made in kept.items()]
    assert sea.lost == wanted


def test_audit_lists_nobody_who_came_back_with_its_state(tmp_path):
    """The control: a death alone loses nothing."""
    sea = Watched(tmp_path, **SYNC)
    sea.faults = FAULTS["both killed"]

    sea.run()

    assert [found for found in sea.lost if found.next is not None] == []


def test_audit_lists_what_every_island_that_left_took_along(tmp_path):
    """At the end of the run all have left: their last residuals are in nobody's weights."""
    sea = Watched(tmp_path, **SYNC)

    sea.run()

    last = {name: sea.of(name)[-1] for name in ("a", "b")}
    wanted = [LostResidual(n, c.round, c.residual, next=None) for n, c in last.items()]
    assert sea.lost == wanted


@pytest.fixture
def stating(lossy: Cluster) -> Cluster:
    """Three rounds of two islands, which state what they leave and carry; `b` is then silent."""
    a, b = lossy.pair()
    for number in (1, 2, 3):
        for island, norm in ((a, 0.25), (b, 0.5)):
            island.send(island.frame(residual=norm * number, carried=number - 1))
        assert lossy.settle() == 1
    lossy.keep_alive(a, seconds=40)
    return lossy


def test_audit_lists_a_dead_island_while_the_run_goes_on_and_stays_clean(stating):
    report = stating.audit(with_replay=True)

    assert report.residuals == [LostResidual("b", 3, 1.5, next=None)]
    assert report.clean
    assert report.as_json()["residuals"] == [
        {"worker_id": "b", "round": 3, "norm": 1.5, "next": None, "carried": 0}
    ]


def test_audit_lists_an_island_that_returned_with_an_older_state(stating):
    a, b = (clusters.HandIsland(stating, name).join() for name in ("a", "b"))
    a.send(a.frame(residual=1.0, carried=3))
    b.send(b.frame(residual=2.0, carried=1))

    assert stating.audit().residuals == [LostResidual("b", 3, 1.5, next=4, carried=1)]


def test_audit_takes_a_residual_of_a_lost_history_for_one_that_was_carried(stating):
    """A coordinator may have been restored from a copy older than its islands' states."""
    b = clusters.HandIsland(stating, "b").join()
    b.send(b.frame(residual=2.0, carried=5))

    assert stating.audit().residuals == []


@pytest.mark.parametrize(("name", "value"), [("residual", 0.125), ("carried", 1)])
def test_audit_names_a_record_that_is_not_what_the_frame_states(stating, name, value):
    clusters.tamper(
        stating.ledger, "contributions", {"round": 3, "worker_id": "a"}, **{name: value}
    )

    [problem, *_] = stating.audit().problems

    assert (problem.round, problem.what) == (3, f"{name} of a")


def test_audit_command_says_what_became_of_each_residual(stating):
    b = clusters.HandIsland(stating, "b").join()
    b.send(b.frame(residual=2.0))
    b.leave()
    stating.close()

    result = CliRunner().invoke(app, ["audit", str(stating.home)])

    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("residual of")]
    assert lines == [
        "residual of b after round 3, norm 1.5: its next contribution, to round 4, carried none",
        "residual of b after round 4, norm 2: the worker is gone with it",
    ]
