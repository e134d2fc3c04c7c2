"""Atoll's own strategies as files of `examples/gradcheck/strategies`: right at uneven counts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.pools.gradcheck.asked import Asked
from atoll.pools.gradcheck.check import check_file
from atoll.pools.gradcheck.crew import Crews
from atoll.pools.gradcheck.outcome import ALL

FILES = Path(__file__).parents[2] / "examples" / "gradcheck" / "strategies"
STRATEGIES = {"diloco": 4e-7, "gather": 4e-7, "sharded": 1e-12}  # the error of each

# One line changed: what the check must see, in how the ranks are weighed or in a scale's name.
BROKEN: dict[str, tuple[str, str, str, str, str | None]] = {
    "diloco weighs alike": (
        *("diloco", 'weighting="tokens"', 'weighting="equal"'),
        *("not a scale", None),
    ),
    "diloco steps half as far": (
        *(
            "diloco",
            'outer={"optimizer": "sgd", "lr": 1.0}',
            'outer={"optimizer": "sgd", "lr": 0.5}',
        ),
        *("scale", "1/2"),
    ),
    "gather weighs alike": (
        *("gather", 'weighting="tokens"', 'weighting="equal"'),
        *("not a scale", None),
    ),
    "gather has who is missing": (
        *("gather", "[: PEERS - 1]", "[:PEERS]"),
        *("not a scale", None),
    ),
    "sharded weighs micro-batches alike": (
        *("sharded", "m.num_rows * BLOCK) for", "int(m.counts)) for"),
        *("not a scale", None),
    ),
    "sharded counts stand-ins": (
        *("sharded", "m.num_rows * BLOCK) for", "len(m.rows) * BLOCK) for"),
        *("not a scale", None),
    ),
}


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    with Crews() as started:
        yield started


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_leaves_the_gradient_of_the_token_mean(crews, name):
    report = check_file(FILES / f"{name}.py", Asked(), crews=crews)

    assert report.verdict == "right", report.sentences
    assert report.worst_error < STRATEGIES[name]


@pytest.mark.parametrize("name", BROKEN)
def test_strategy_that_counts_otherwise_is_found(crews, tmp_path, name):
    """The control."""
    file, right, wrong, what, ratio = BROKEN[name]
    source = (FILES / f"{file}.py").read_text()
    assert source.count(right) == 1
    path = tmp_path / f"{file}.py"
    path.write_text(source.replace(right, wrong))

    report = check_file(path, Asked(), crews=crews)

    found = {(one.what, one.name) for one in report.defects if one.tensor and one.term != ALL}
    assert report.verdict == "wrong", report.sentences
    assert found == {(what, ratio)}
