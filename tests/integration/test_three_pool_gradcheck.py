"""The three-pool example's gradients, on ranks of four sizes, against one process."""

import pytest
import torch

from atoll.pools.gradcheck import compare, sizes
from atoll.pools.gradcheck.asked import Asked
from atoll.pools.gradcheck.defects import Run, defects
from atoll.pools.gradcheck.loading import Place, default_dtype, place_of
from atoll.pools.gradcheck.outcome import ALL
from atoll.pools.gradcheck.topology_check import TopologyCheck
from atoll.pools.gradcheck.topology_ranks import CrewRanks, ThreadRanks
from examples import three_pool
from tests.topologies import even_three_pool

SIZES = ["(4, 2x2, 2)", "(3, 2x1, 6)", "(2, 2x4, 6)", "(4, 3x2, 1)"]
TOPS = {"uneven": three_pool.top, "even": even_three_pool.top}


@pytest.fixture(autouse=True)
def _float64():
    with default_dtype(torch.float64):
        yield


@pytest.fixture(scope="module")
def checks():
    with default_dtype(torch.float64):
        return {name: TopologyCheck(top) for name, top in TOPS.items()}


def sized(label):
    tops = [three_pool.top, *(three_pool.top.sized(**other) for other in three_pool.top.sizes)]
    (found,) = [top.size for top in tops if sizes.named(top).label == label]
    return found


def planned(check, label):
    return check.planned(check.top.sized(**sized(label)))


def measured(check, plan, mutant):
    """Ratio and residual of each pair after one step of a mutant."""
    (left,) = ThreadRanks().run(plan, check.weights, steps=1, mutant=mutant)
    return {
        (pair.term, pair.tensor): pair
        for pair in compare.compare(check.reference[0], left, tolerance=1e-9)
        if pair.term != ALL and pair.ratio is not None
    }


def bits(outcome):
    return {
        (lane, name): grad.contiguous().view(torch.uint8).numpy().tobytes()
        for lane, grads in outcome.grads.items()
        for name, grad in grads.items()
    }


@pytest.mark.parametrize("label", SIZES)
@pytest.mark.parametrize("counts", TOPS)
def test_gradients_of_ranks_are_those_of_one_process(checks, counts, label):
    check = checks[counts]

    runs = check.runs(planned(check, label), ThreadRanks())

    assert [run.step for run in runs] == [1, 2]
    for run in runs:
        assert [pair for pair in run.pairs if pair.is_wrong] == []
        assert {pair.term for pair in run.pairs} == {ALL, "faith", "stoch", "minimal", "adversary"}
        assert [logged for logged in run.logged if logged.is_wrong] == []
        assert {one.kind for one in run.logged} == {"loss", "count", "clip norm"}
        assert run.differing == ()


@pytest.mark.parametrize("label", SIZES)
def test_gradients_in_float32_are_those_of_a_float32_reference_in_the_first_step(label):
    with default_dtype(torch.float32):
        check = TopologyCheck(three_pool.top, steps=1, tolerance=4e-7)

        (run,) = check.runs(planned(check, label), ThreadRanks())

    assert [pair for pair in run.pairs if pair.is_wrong] == []


@pytest.mark.parametrize(("counts", "label"), [("uneven", SIZES[0]), ("even", SIZES[1])])
def test_processes_give_the_bits_of_threads(checks, crews, counts, label):
    check = checks[counts]
    top = TOPS[counts]
    place = place_of(top, defined_in=top.written_in)
    assert isinstance(place, Place)
    plan = planned(check, label)

    threads = ThreadRanks().run(plan, check.weights, steps=2)
    processes = CrewRanks(crews, place).run(plan, check.weights, steps=2)

    assert [bits(one) for one in processes] == [bits(one) for one in threads]
    assert [one.losses for one in processes] == [one.losses for one in threads]
    assert [one.counts for one in processes] == [one.counts for one in threads]


@pytest.fixture(scope="module")
def report(checks):
    """All mutants at all four sizes."""
    with default_dtype(torch.float64):
        return checks["uneven"].report(ThreadRanks(), Asked(mutants=True))


def test_example_is_right_and_all_of_its_mutants_are_seen_as_predicted(report):
    assert report.sentences == ()
    assert (report.verdict, report.exit_code) == ("right", 0)
    assert [kill for kill in report.kills if kill.state == "survived"] == []
    assert {kill.size for kill in report.kills} == set(SIZES)


def test_each_mutant_is_killed_at_one_size_at_least(report):
    killed = {kill.mutant for kill in report.kills if kill.state == "killed"}
    held = {kill.mutant for kill in report.kills if kill.state == "held"}

    assert {kill.mutant for kill in report.kills} == killed | held
    assert held == {"rank lost with its count: stoch", "rank lost with its count: adversary"}
    assert len(killed) >= 40


def test_mutants_are_listed_only_where_their_table_is_all_ones(report):
    listed = {(kill.mutant, kill.size) for kill in report.kills if kill.state == "listed"}

    assert all(
        kill.predicted == "the same program" for kill in report.kills if kill.state == "listed"
    )
    assert listed == {
        ("reduce layers: SUM to AVG", "(3, 2x1, 6)"),
        ("reduce layers: SUM twice", "(3, 2x1, 6)"),
        ("reduce layers: SUM to none", "(3, 2x1, 6)"),
        ("return ppgd -> layers: to all replicas", "(3, 2x1, 6)"),
        ("once faith: on all", "(3, 2x1, 6)"),
        ("once faith: counted by all", "(3, 2x1, 6)"),
        ("return ppgd -> layers: SUM to AVG", "(4, 3x2, 1)"),
        ("return ppgd -> layers: SUM to none", "(4, 3x2, 1)"),
        ("count adversary: local", "(4, 3x2, 1)"),
    }


def wrong_ratios(found):
    """Ratios other than 1, by term and by whose tensors."""
    whose = {"components": "V/U", "importance": "CI"}
    return {
        (term, whose[tensor.split(".")[0].split("[")[0]], round(pair.ratio, 9))
        for (term, tensor), pair in found.items()
        if abs(pair.ratio - 1) > 1e-9 or pair.residual > 1e-9
    }


@pytest.mark.parametrize("label", SIZES)
def test_legacy_is_wrong_by_the_sizes_of_two_pools(checks, label):
    check = checks["uneven"]
    plan = planned(check, label)
    n_ci, n_per_block = plan.top.pools["ci"].ranks, plan.top.pools["layers"].ranks
    stoch = round(n_ci / n_per_block, 9)
    on_components = {("stoch", "V/U", stoch)} if stoch != 1 else set()

    legacy = wrong_ratios(measured(check, plan, "legacy"))
    mended = wrong_ratios(measured(check, plan, "legacy with #545"))

    assert legacy == on_components | {("adversary", "CI", round(1 / n_ci, 9))}
    assert mended == on_components


def test_legacy_at_the_sizes_of_the_live_run_is_16_times_and_a_32nd():
    check = TopologyCheck(three_pool.top.with_rows(32), steps=1)
    plan = check.planned(check.top.sized(ci=32, layers=(2, 2), ppgd=2))

    found = wrong_ratios(measured(check, plan, "legacy"))

    assert found == {("stoch", "V/U", 16.0), ("adversary", "CI", 0.03125)}


@pytest.mark.parametrize(
    ("mutant", "named"),
    [
        ("reduce ci: SUM to AVG", "1/n_ci"),
        ("once faith: on all", "n_per_block"),
        ("return ppgd -> layers: to all replicas", "n_per_block"),
        ("sum minimal: autograd all-reduce", "n_ci"),
        ("return ppgd -> layers: SUM to AVG", "1/n_ppgd"),
        ("legacy with #545", "n_ci/n_per_block"),
    ],
)
def test_wrong_ratio_is_named_by_what_fits_at_all_four_sizes(checks, mutant, named):
    check = checks["uneven"]
    runs = []
    for label in SIZES:
        plan = planned(check, label)
        (left,) = ThreadRanks().run(plan, check.weights, steps=1, mutant=mutant)
        pairs = compare.compare(check.reference[0], left, tolerance=1e-12)
        runs.append(Run(sizes.named(plan.top), tuple(pairs), counts=check.reference[0].counts))

    found = {defect.name for defect in defects(runs, tolerance=1e-12) if defect.term != ALL}

    assert found == {named}


@pytest.mark.parametrize(
    ("at", "hidden"),
    [
        ({"ci": 2, "layers": (2, 2), "ppgd": 2}, ["legacy with #545"]),
        ({"ci": 4, "layers": (2, 2), "ppgd": 2}, []),
    ],
)
def test_sizes_that_hide_a_mistake_take_the_verdict_away(checks, at, hidden):
    report = checks["uneven"].report(ThreadRanks(), Asked(sizes=[at]))

    assert [one for one in report.unproven if "is the same program at every size" in one] == [
        f"no verdict: mutant {name!r} is the same program at every size; run another size"
        for name in hidden
    ]
    assert report.exit_code == (3 if hidden else 0)


def test_ranks_that_are_all_alone_prove_hardly_anything(checks):
    alone = Asked(sizes=[{"ci": 1, "layers": (1, 1), "ppgd": 1}])

    report = checks["uneven"].report(ThreadRanks(), alone)

    assert (report.defects, report.exit_code) == ((), 3)
    assert len(report.unproven) > 15


def test_rows_of_even_counts_take_the_verdict_away(checks):
    report = checks["even"].report(ThreadRanks(), Asked())

    assert report.defects == ()
    assert (report.verdict, report.exit_code) == ("no verdict", 3)
    assert "every rank has the same count" in report.sentences[0]
