"""Twelve public bugs as files of `examples/gradcheck`: found and named, and gone when mended.

Ranks start once for each size and check all files. A file is mended by the change of its line that
is the bug, so that nothing else in it can be what was found.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.pools.gradcheck.asked import Asked
from atoll.pools.gradcheck.check import check_file
from atoll.pools.gradcheck.crew import Crews
from atoll.pools.gradcheck.outcome import ALL
from atoll.pools.gradcheck.report import Report

FILES = Path(__file__).parents[2] / "examples" / "gradcheck"

NET = ("0.weight", "0.bias", "2.weight", "2.bias")
ROUTER = ("router.weight", "router.bias")
UNEVEN, SCALE, DEAD = "not a scale", "scale", "dead"

# What is wrong of which term on which tensors, and the name of its ratio.
FOUND: dict[str, tuple[str, tuple[str, ...], str, str | None]] = {
    "transformers_34191": ("nll", NET, UNEVEN, None),
    "transformers_34242": ("nll", NET, UNEVEN, None),
    "transformers_48690": ("auxiliary", ROUTER, SCALE, "ranks"),
    "torchtune_2172": ("nll", NET, SCALE, "1/ranks"),
    "torchtitan_2972": ("nll", NET, SCALE, "count of nll"),
    "accelerate_3533": ("nll", NET, SCALE, "1/4"),
    "megatron_906": ("nll", NET, SCALE, "2"),
    "megatron_3672": ("auxiliary", ROUTER, SCALE, "1/ranks"),
    "automodel_1408": ("auxiliary", ROUTER, DEAD, "0"),
    "open_clip_616": ("clip", NET, SCALE, "ranks"),
    "veomni_184": ("", (), "", None),
    "pytorch_128949": ("nll", tuple(f"used.{name}" for name in NET), UNEVEN, None),
}
REPLICAS = {"pytorch_128949": tuple(f"used.{name}" for name in NET)}
CLIP_NORM = {"veomni_184": "sqrt(2)"}

MENDED: dict[str, tuple[tuple[str, str], ...]] = {
    "transformers_34191": (
        ("share = sample.over_ranks(1) * STEPS", "tokens = sample.over_ranks(int(rows[2].sum()))"),
        ("/ count / share", "/ tokens"),
    ),
    "transformers_34242": (
        ("total / count", "total / sample.over_ranks(count) * sample.over_ranks(1)"),
    ),
    "transformers_48690": (
        ("((loss + extra) * dist.get_world_size())", "(loss * dist.get_world_size() + extra)"),
    ),
    "torchtune_2172": (
        (
            "    fully_shard(model)\n",
            "    from atoll.pools.adapters import fsdp2\n\n"
            "    fsdp2.sum_gradients(fully_shard(model))\n",
        ),
    ),
    "torchtitan_2972": (("* total).backward()", "* total / tokens).backward()"),),
    "accelerate_3533": (("(loss / STEPS)", "loss"),),
    "megatron_906": (("/= data", "/= data * CONTEXT"),),
    "megatron_3672": (("(loss + extra)", "(loss + extra * ranks)"),),
    "automodel_1408": (("    Riding.apply(", "    loss = Riding.apply("),),
    "open_clip_616": (
        ("everyones = gradients[0].clone()\n        dist.all_reduce(everyones)\n", ""),
        ("        return everyones\n\n\n@loop.step", "        return gradients[0]\n\n\n@loop.step"),
    ),
    "veomni_184": (
        ("all_reduce(squares)", 'all_reduce(squares, group=mesh["shard"].get_group())'),
    ),
    "pytorch_128949": (("Parallel(model)", "Parallel(model, find_unused_parameters=True)"),),
}


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    with Crews() as started:
        yield started


@pytest.fixture(scope="module")
def reports(crews: Crews) -> dict[str, Report]:
    return {name: check_file(FILES / f"{name}.py", Asked(), crews=crews) for name in FOUND}


def mended(name: str, folder: Path) -> Path:
    source = (FILES / f"{name}.py").read_text()
    for wrong, right in MENDED[name]:
        assert source.count(wrong) == 1, wrong
        source = source.replace(wrong, right)
    path = folder / f"{name}.py"
    path.write_text(source)
    return path


def test_every_file_is_of_a_bug_that_is_told_here():
    files = {path.stem for path in FILES.glob("*.py")} - {"sample"}

    assert files == FOUND.keys() == MENDED.keys()


@pytest.mark.parametrize("name", FOUND)
def test_public_bug_is_found_on_its_tensors_and_named(reports, name):
    term, tensors, what, ratio = FOUND[name]
    report = reports[name]
    told = [one for one in report.defects if one.term]
    wrong = {
        (pair.term, pair.tensor)
        for run in report.runs
        for pair in run.pairs
        if pair.is_wrong and pair.term != ALL
    }

    assert report.verdict == "wrong", report.sentences
    assert wrong == {(term, tensor) for tensor in tensors}
    assert {(one.term, one.tensor, one.what, one.name) for one in told} == {
        (term, tensor, what, ratio) for tensor in tensors
    }


@pytest.mark.parametrize("name", FOUND)
def test_public_bug_is_seen_in_replicas_and_logs_only_where_it_is(reports, name):
    defects = reports[name].defects
    differing = tuple(one.tensor for one in defects if one.what == "replicas")
    logged = {one.what: one.name for one in defects if one.what in ("clip norm", "loss", "count")}

    assert differing == REPLICAS.get(name, ())
    assert logged == ({"clip norm": CLIP_NORM[name]} if name in CLIP_NORM else {})


def test_loss_that_is_logged_is_right_where_its_gradient_is_not(reports):
    """The loss curve of torchtitan's looked well."""
    logged = [one for run in reports["torchtitan_2972"].runs for one in run.logged]

    assert [(one.kind, one.is_wrong) for one in logged] == [("loss", False)] * 2


@pytest.mark.parametrize("name", FOUND)
def test_public_bug_is_gone_when_its_line_is_mended(crews, tmp_path, name):
    report = check_file(mended(name, tmp_path), Asked(), crews=crews)

    assert report.verdict == "right", report.sentences
    assert report.worst_error < 1e-12
