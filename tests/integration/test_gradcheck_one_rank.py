"""A topology whose pools have one rank each: most mutants are the same program, none is hidden."""

from atoll.pools import check
from examples.encoder_heads import top


def test_pools_of_one_rank_leave_no_verdict_and_no_survivor():
    report = check(top, sizes=[{"encoder": 1, "heads": (2, 1)}], mutants=True)

    states = {kill.mutant: kill.state for kill in report.kills}
    assert report.survivors == ()
    assert report.verdict == "no verdict"
    assert states["reduce encoder: SUM to AVG"] == "listed"
    assert states["rank lost, count kept: sparse"] == "killed"
