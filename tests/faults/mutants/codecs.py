"""Mutants of how values travel: what a residual weighs, how chance rounds, what is kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from atoll.codecs import scaled
from atoll.codecs.sign.codec import Sign
from atoll.codecs.topk import chunks
from atoll.compiled.arrays import Floats
from atoll.island.state.continuity import Continuity
from atoll.island.state.encoding import Feedback
from atoll.simulate.faults.scenario import Scenario
from atoll.strategies import build
from atoll.strategies.diloco import sync
from tests.faults.mutants.mutant import Mutant, Patch, Wanted, adding_to, feeding

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


def travelling(way: str, *names: str, by_chance: bool = False) -> Wanted:
    """Seeds whose uploads or downloads have one of these codecs, or round by chance."""

    def wanted(scenario: Scenario) -> bool:
        codec = scenario.settings[way]
        is_rounded = codec.get("rounding") == "stochastic" or not by_chance
        return is_rounded and (not names or codec["codec"] in names)

    return wanted


@mutant("residual-carried", feeding(most=0.95))
def a_residual_does_not_decay(patch: Patch) -> None:
    real = Continuity.feedback

    @contextmanager
    def feedback(self: Continuity, path: Path, round_number: int) -> Iterator[Feedback | None]:
        with real(self, path, round_number) as feed:
            yield feed and replace(feed, decay=1.0)

    patch.setattr(Continuity, "feedback", feedback)


@mutant("residual-carried", travelling("upload", by_chance=True))
def every_round_has_the_same_chance(patch: Patch) -> None:
    real = build.upload_noise
    patch.setattr(build, "upload_noise", lambda manifest, _, name: real(manifest, 1, name))


@mutant("weights-bits", travelling("download", by_chance=True))
def a_published_update_is_rounded_by_another_chance(patch: Patch) -> None:
    patch.setattr(sync, "NOISE_LANE_DOWNLOAD", "upload/island-0")


@mutant("weights-bits", travelling("download", "int4", "int8", by_chance=True))
def an_update_is_rounded_to_nearest_and_named_stochastic(patch: Patch) -> None:
    real = scaled._round

    def rounded(quotients: Tensor, _: Tensor | None) -> None:
        real(quotients, None)

    patch.setattr(scaled, "_round", rounded)


@mutant("weights-bits", travelling("download", "topk"))
def the_smallest_values_are_kept(patch: Patch) -> None:
    def smallest(values: Floats) -> Any:
        by_size = np.argsort(np.abs(values), axis=1)
        return np.sort(by_size[:, : chunks.num_kept(values.shape[1])], axis=1)

    patch.setattr(chunks, "_largest", smallest)


@mutant("weights-bits", travelling("download", "sign"))
def a_sign_has_the_largest_magnitude_as_scale(patch: Patch) -> None:
    real = Sign._quantize

    def quantize(self: Sign, blocks: Tensor, *args: Any, **more: Any) -> Tensor:
        largest = blocks.abs().amax(dim=1)
        real(self, blocks, *args, **more)
        return largest

    patch.setattr(Sign, "_quantize", quantize)
