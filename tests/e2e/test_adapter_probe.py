"""Adapters on three gloo ranks: a known gradient arrives as its plain sum, or is named."""

from pathlib import Path
from typing import Any

import pytest

from tests import torchruns

PROGRAM = Path(__file__).parents[1] / "ranks" / "probes.py"
RANKS = 3
DTYPES = ("fp32", "float64", "bf16")
MEAN = "0.3333 of the sum = 1/ranks, the mean"
RAISES = "PREMUL_SUM"
SUMMED = ""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote."""
    home = tmp_path_factory.mktemp("probes")
    words = [str(PROGRAM), str(home)]
    with torchruns.torchrun(words, home / "group.log", ranks=RANKS) as group:
        assert group.wait() == 0
    results = torchruns.results(home, ranks=RANKS)
    return [results[rank] for rank in range(RANKS)]


# torch 2.13 on gloo; what float64 alone shows would hide a missing half.
TABLE = {
    "fully_shard {}": (SUMMED, SUMMED, SUMMED),
    "fully_shard {}, none": (MEAN, MEAN, MEAN),
    "fully_shard {}, only factor": (RAISES, SUMMED, RAISES),
    "fully_shard {}, only sum": (MEAN, MEAN, MEAN),
    "replicate {}": (SUMMED, SUMMED, SUMMED),
    "replicate {}, none": (MEAN, MEAN, MEAN),
    "replicate {}, only factor": (SUMMED, SUMMED, SUMMED),
    "replicate {}, only sum": (MEAN, MEAN, MEAN),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("setting", TABLE)
def test_fsdp2_and_replicate_are_named_by_what_their_settings_do(found, setting, dtype):
    expected = TABLE[setting][DTYPES.index(dtype)]

    kinds = {one["cases"][setting.format(dtype)]["type"] for one in found}
    messages = {one["cases"][setting.format(dtype)]["message"] for one in found}

    assert kinds == {"NotSummed" if expected else "summed"}
    assert len(messages) == 1
    assert expected in messages.pop()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["fully_shard", "replicate"])
def test_module_that_the_setters_did_not_reach_is_named(found, way, dtype):
    case = found[0]["cases"][f"{way} {dtype}, only root"]

    assert case["type"] == "NotSummed"
    assert f"no sums: in module 'head' 'head.0.weight' and 3 more: {MEAN};" in case["message"]
    assert "body" not in case["message"]


@pytest.mark.parametrize(
    "case",
    [
        "ddp",
        "ddp, views",
        "ddp, unused",
        "ddp, static",
        "ddp by rows",
        "fsdp2 by rows",
        "fsdp2, reduced in bf16",
        "hybrid",
    ],
)
def test_adapter_that_sums_passes(found, case):
    assert [one["cases"][case]["type"] for one in found] == ["summed"] * RANKS


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("ddp, default", "NotSummed", f"'body.weight' and 6 more: {MEAN}"),
        ("ddp, default static", "NotSummed", "DDP's own divides by the number of ranks"),
        ("ddp, halved", "NotSummed", "'body.weight' and 6 more: 0.5 of the sum;"),
        ("ddp, unsummed", "NotSummed", "each rank's own, not summed"),
        ("ddp, one ignored", "NotSummed", "no sums: 'head.0.weight': each rank's own"),
        ("ddp without rows", "ConfigError", "gradient of every rank zero"),
        ("hybrid, default", "NotSummed", MEAN),
        ("replicate by rows", "ConfigError", "no place before its sum"),
        ("plain", "ConfigError", "nothing to probe"),
    ],
)
def test_adapter_that_does_not_sum_is_refused_by_name_on_every_rank(found, case, kind, words):
    outcomes = [one["cases"][case] for one in found]

    assert [one["type"] for one in outcomes] == [kind] * RANKS
    assert all(words in one["message"] for one in outcomes)
    assert len({one["message"] for one in outcomes}) == 1


def test_probe_leaves_tensors_gradients_hooks_and_optimizers_as_they_were(found):
    """Refused or not; hooks of the user's own did not run, an optimizer among them."""
    changed = {
        f"{name} on rank {rank}": case["changed"]
        for rank, one in enumerate(found)
        for name, case in one["cases"].items()
    }

    assert {name: names for name, names in changed.items() if names} == {}


@pytest.mark.parametrize("way", ["ddp", "ddp, views", "fsdp2", "replicate"])
def test_training_after_a_probe_has_the_bits_of_training_without(found, way):
    assert [one["same"][way] for one in found] == [True] * RANKS


def test_dtensor_sums_totals_and_counts_exactly(found):
    expected = [[6.0, 6.0], 3 * 2**24 + 6, "tokens"]

    assert [one["dtensor"]["total"] for one in found] == [expected] * RANKS
    assert [one["dtensor"]["back"] for one in found] == [
        [[rank + 1.0] * 2, 2**24 + 1 + rank, "tokens"] for rank in range(RANKS)
    ]


def test_dtensor_that_is_no_partial_sum_is_refused(found):
    refused = found[0]["dtensor"]["refused"]

    assert len(refused) == 4
    assert all(sentence.startswith("ProtocolError") for sentence in refused.values())
    assert "'avg'" in refused["P(avg)"]
