"""The hash chain against an independent computation, and every way it can break."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from atoll import canonical
from atoll.ledger import chain
from atoll.ledger.records import (
    ContributionRecord,
    ManifestRecord,
    RoundRecord,
    RoundState,
    RunRecord,
)


def manifest(version: int, *, from_round: int) -> ManifestRecord:
    body = f'{{"version":{version}}}'
    return ManifestRecord(version, hashlib.sha256(body.encode()).hexdigest(), body, from_round)


RUN = RunRecord(run_id="run-1", created_wall=1.0, initial_sha256="i" * 64)
FIRST, SECOND = manifest(1, from_round=1), manifest(2, from_round=3)


def contribution(worker_id: str, *, round_number: int = 1) -> ContributionRecord:
    return ContributionRecord(
        round=round_number,
        worker_id=worker_id,
        applied=round_number,
        first=round_number,
        fragment=0,
        base="b",
        incarnation=1,
        sha256=f"{worker_id}{round_number}",
        nbytes=10,
        weight=3,
        rows=8,
        tokens=512,
        loss_sum=1.5,
        norm=2.5,
        residual=0.0,
        carried=0,
        receipt="r",
        accepted_wall=9.0,
    )


def of_round(number: int) -> list[ContributionRecord]:
    return [contribution(name, round_number=number) for name in ("a", "b")]


@dataclass(frozen=True)
class History:
    """What check_chain reads."""

    rounds: list[RoundRecord]
    manifests: list[ManifestRecord]
    contributions_of: Callable[[int], list[ContributionRecord]]
    run: RunRecord = RUN

    def check(self) -> chain.Break | None:
        return chain.check_chain(self.run, self.manifests, self.rounds, self.contributions_of)

    def with_round(self, number: int, **changes: object) -> "History":
        rounds = [
            replace(r, **changes) if r.round == number else r  # type: ignore[arg-type]
            for r in self.rounds
        ]
        return replace(self, rounds=rounds)

    def with_contribution(self, number: int, **changes: object) -> "History":
        def changed(asked: int) -> list[ContributionRecord]:
            first, *rest = of_round(asked)
            return [replace(first, **changes) if asked == number else first, *rest]  # type: ignore[arg-type]

        return replace(self, contributions_of=changed)


@pytest.fixture
def history() -> History:
    """Rounds 1 to 4 published, 5 frozen, 6 planned; the second manifest rules from round 3 on."""
    previous = chain.genesis_hash(RUN, FIRST.sha256)
    rounds = []
    for number in (1, 2, 3, 4):
        record = RoundRecord(
            round=number,
            state=RoundState.PUBLISHED,
            manifest_sha256=(FIRST if number < 3 else SECOND).sha256,
            cursor=16 * number,
            prev_hash=previous,
            master_digest=f"master {number}",
            published_digest=f"published {number}",
            leaves=b"leaves",
            published_wall=1.0,
        )
        previous = chain.round_hash(record, of_round(number))
        rounds.append(replace(record, hash=previous))
    rounds.append(RoundRecord(5, RoundState.FROZEN, SECOND.sha256, 80))
    rounds.append(RoundRecord(6, RoundState.PLANNED, SECOND.sha256, 96))
    return History(rounds, [FIRST, SECOND], of_round)


def hash_of(contributions: list[ContributionRecord], **changes: object) -> str:
    record = RoundRecord(
        7,
        RoundState.PUBLISHED,
        "m",
        0,
        prev_hash="p",
        master_digest="d",
        published_digest="e",
    )
    return chain.round_hash(replace(record, **changes), contributions)  # type: ignore[arg-type]


def test_round_hash_is_the_sha256_of_the_documented_json():
    text = (
        '{"contributions":[["a","a7",3,8,512],["b","b7",3,8,512]],"kind":"round",'
        '"manifest":"m","master":"d","prev":"p","published":"e","round":7}'
    )

    assert hash_of(of_round(7)) == hashlib.sha256(text.encode()).hexdigest()


def test_round_hash_of_a_sync_run_is_what_it_was_before_there_were_fragments():
    golden = "5a3d47630fcb02515c22e7de842c7b7545458a13ca8ff6a3f749eda75ddb868d"

    assert hash_of(of_round(7)) == golden


def test_round_hash_of_a_late_contribution_is_the_sha256_of_the_documented_json():
    late = replace(contribution("a", round_number=5), first=4, applied=7)
    text = (
        '{"contributions":[["a","a5",3,8,512,[5,4]]],"fragment":-1,"kind":"round",'
        '"manifest":"m","master":"d","prev":"p","published":"e","round":7}'
    )

    assert hash_of([late], fragment=-1) == hashlib.sha256(text.encode()).hexdigest()


def test_fold_of_one_worker_is_hashed_by_the_round_it_was_made_for():
    late, mine = contribution("a", round_number=5), contribution("a", round_number=7)

    assert hash_of([late, mine]) == hash_of([mine, late])


def test_genesis_hash_is_the_sha256_of_the_documented_json():
    text = '{"initial":"i","kind":"genesis","manifest":"m","run":"r"}'
    run = RunRecord("r", 0.0, "i")

    assert chain.genesis_hash(run, "m") == hashlib.sha256(text.encode()).hexdigest()


def test_round_hash_does_not_depend_on_arrival_order():
    straight, reverse = of_round(1), of_round(1)[::-1]

    assert hash_of(straight) == hash_of(reverse)


@pytest.mark.parametrize(
    "changes", [{"norm": 9.0}, {"accepted_wall": 8.0}, {"receipt": "x"}, {"loss_sum": 7.0}]
)
def test_round_hash_leaves_out_norms_and_times(changes: dict[str, float]):
    first, second = of_round(1)

    assert hash_of([replace(first, **changes), second]) == hash_of([first, second])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field",
    [
        "prev_hash",
        "round",
        "manifest_sha256",
        "master_digest",
        "published_digest",
        "fragment",
    ],
)
def test_round_hash_covers_every_argument(field: str):
    assert hash_of(of_round(1), **{field: 99}) != hash_of(of_round(1))


@pytest.mark.parametrize("field", ["worker_id", "sha256", "weight", "rows", "tokens"])
def test_round_hash_covers_what_the_fold_uses(field: str):
    first, second = of_round(1)
    changed = [replace(first, **{field: "0"}), second]  # type: ignore[arg-type]

    assert hash_of(changed) != hash_of(of_round(1))


@pytest.mark.parametrize("changes", [{"round": 6}, {"first": 6}])
def test_round_hash_covers_which_rounds_a_contribution_is_of(changes: dict[str, int]):
    first, second = of_round(7)

    assert hash_of([replace(first, **changes), second]) != hash_of(of_round(7))  # type: ignore[arg-type]


def test_canonical_refuses_numbers_that_json_does_not_have():
    with pytest.raises(ValueError, match="JSON"):
        canonical.dumps([float("nan")])


def test_check_chain_finds_nothing_in_a_whole_history(history: History):
    assert history.check() is None


def test_check_chain_finds_nothing_before_the_first_round():
    assert History([], [FIRST], of_round).check() is None


BREAKS = [
    (lambda h: h.with_round(2, prev_hash="x"), 2, "prev_hash"),
    (lambda h: h.with_round(2, hash="x"), 2, "hash"),
    (lambda h: h.with_round(2, hash=None), 2, "hash"),
    (lambda h: h.with_round(3, master_digest="x"), 3, "hash"),
    (lambda h: h.with_round(3, published_digest="x"), 3, "hash"),
    (lambda h: h.with_round(3, master_digest=None), 3, "master_digest"),
    (lambda h: h.with_round(3, published_digest=None), 3, "published_digest"),
    (lambda h: h.with_round(3, leaves=None), 3, "leaves"),
    (lambda h: h.with_round(3, manifest_sha256=FIRST.sha256), 3, "manifest_sha256"),
    (lambda h: h.with_round(5, manifest_sha256=FIRST.sha256), 5, "manifest_sha256"),
    (lambda h: h.with_round(2, state=RoundState.FROZEN), 3, "state"),
    (lambda h: h.with_contribution(4, sha256="x"), 4, "hash"),
    (lambda h: h.with_contribution(4, weight=4), 4, "hash"),
    (lambda h: replace(h, contributions_of=lambda n: of_round(n)[:1]), 1, "hash"),
    (lambda h: replace(h, rounds=h.rounds[1:]), 1, "round"),
    (lambda h: replace(h, rounds=h.rounds[:2] + h.rounds[3:]), 3, "round"),
    (lambda h: replace(h, rounds=[h.rounds[0], *h.rounds]), 2, "round"),
    (lambda h: replace(h, run=replace(RUN, run_id="other")), 1, "prev_hash"),
    (lambda h: replace(h, run=replace(RUN, initial_sha256="other")), 1, "prev_hash"),
    (lambda h: replace(h, manifests=[]), 0, "manifests"),
    (lambda h: replace(h, manifests=[FIRST]), 3, "manifest_sha256"),
    (lambda h: replace(h, manifests=[replace(FIRST, from_round=2), SECOND]), 1, "manifest_sha256"),
    (lambda h: replace(h, manifests=[FIRST, replace(SECOND, body="{}")]), 3, "manifest body"),
]


@pytest.mark.parametrize(("tamper", "number", "field"), BREAKS)
def test_check_chain_names_the_first_broken_round_and_field(
    history: History, tamper: Callable[[History], History], number: int, field: str
):
    broken = tamper(history).check()

    assert broken is not None
    assert (broken.round, broken.field) == (number, field)
    assert f"round {number}" in broken.reason or number == 0


def test_check_chain_ignores_wall_times(history: History):
    later = replace(history.with_round(2, published_wall=99.0), run=replace(RUN, created_wall=5.0))

    assert later.check() is None
