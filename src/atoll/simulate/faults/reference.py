"""The outer step once more, in plain numpy: what the weights must be, computed independently.

Reads the recorded contributions' blobs as files and folds them in worker_id order. Shares with the
code under test only the frame's header and the params digest.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.layout import Fragment, Layout
from atoll.simulate.faults import clipped, payloads, standin
from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.payloads import Floats, Lane
from atoll.simulate.faults.rules import Rules
from atoll.simulate.faults.scenario import BLOCK
from atoll.strategies.base import ALL, Fragments, Strategy
from atoll.sums import digest as digests
from atoll.wire import frame
from atoll.wire.header import FrameHeader

F = np.float32


@dataclass(frozen=True)
class Version:
    """The weights of one version, and the outer optimizer's state."""

    number: int
    master: Floats
    published: Floats
    slots: dict[str, Floats]
    master_digest: str
    published_digest: str  # of the whole model, as `master_digest` is

    def digests(self, fragment: Fragment) -> tuple[str, str]:
        """The digests of a fragment's part of the master and of the published weights."""
        where = slice(fragment.span.start, fragment.span.stop)
        master, published = self.master[where], self.published[where]
        return digest_of(master, fragment.layout), digest_of(published, fragment.layout)


def digest_of(values: Floats, layout: Layout = standin.LAYOUT) -> str:
    """The params digest of a flat buffer."""
    return digests.digest(layout, torch.from_numpy(values)).root


class Reference:
    """Every version so far, from the initial weights on."""

    def __init__(self, blobs: Path, strategy: Strategy, rules: Rules, *, last: int) -> None:
        self._blobs = blobs
        self.rules = rules
        self._last = last  # the round that the run ends with
        self._fragments = Fragments.of(strategy, standin.LAYOUT)
        self.whole = self._fragments[ALL]
        self._ticks = 0  # contributions folded so far
        initial = standin.INITIAL.numpy().copy()
        digest = digest_of(initial)
        self.versions = [Version(0, initial, initial, {}, digest, digest)]

    @property
    def newest(self) -> Version:
        return self.versions[-1]

    def path(self, sha256: str) -> str:
        """Where a blob's bytes are."""
        return f"{self._blobs}/{sha256[:2]}/{sha256}"

    def frame(self, sha256: str) -> tuple[FrameHeader, bytes]:
        """Header and payload of a stored frame."""
        data = Path(self.path(sha256)).read_bytes()
        header, offset = frame.parse_preamble(data[: frame.MAX_PREAMBLE_BYTES])
        return header, data[offset : offset + header.payload_bytes]

    def fragment(self, number: int) -> Fragment:
        """The fragment that a round carries."""
        return self._fragments[self.carried(number)]

    def carried(self, number: int) -> int:
        """The number of that fragment, or ALL."""
        return self.rules.fragment(number, is_last=number >= self._last)

    def base(self, number: int) -> str:
        """The digest that contributions made for a round start from, as far as it is published."""
        before = self.versions[min(number - 1, self.newest.number)]
        return before.digests(self.fragment(number))[1]

    def advance(self, view: View, number: int) -> list[tuple[Row, FrameHeader]]:
        """Computes round `number` from what the ledger says was accepted; what was folded."""
        terms = view.terms(number)
        settings = terms.settings
        before, fragment = self.newest, self.fragment(number)
        where = slice(fragment.span.start, fragment.span.stop)
        assert before.number == number - 1, (before.number, number)
        deltas, folded, raw = [], [], []
        for row in view.accepted(number):
            header, payload = self.frame(row.sha256)
            folded.append((row, header))
            upload = view.terms(row.round).settings["upload"]
            raw.append(payload)
            deltas.append(payloads.decode(payload, upload, len(fragment.span)))
        assert deltas, f"round {number} has no contribution"
        slots = {name: values.copy() for name, values in before.slots.items()}
        master, published = before.master.copy(), before.published.copy()
        asked = terms.asked.outer(number, self._ticks)

        def slot(name: str) -> Floats:
            return slots.setdefault(name, np.zeros_like(master))[where]

        if terms.asked.gathers:
            counts = [1 if settings["weighting"] == "equal" else row.tokens for row, _ in folded]
            mean = clipped.mean(raw, counts, standin.LAYOUT)
            _step(master[where], mean, slot, settings["outer"], number)
        elif asked.one_by_one:
            for tick, (row, delta) in enumerate(
                zip(view.accepted(number), deltas, strict=True), start=self._ticks + 1
            ):
                scaled = delta * _factor(number - row.round, row.tokens, settings)
                _step(master[where], scaled, slot, settings["outer"], tick)
        else:
            contained = [
                row.tokens + view.earlier_tokens(row.worker_id, row.first, row.round)
                for row, _ in folded
            ]
            mean = _mean(deltas, contained, settings["weighting"])
            _step(master[where], mean, slot, settings["outer"], asked.step)
        download = settings["download"]
        if download["codec"] == "fp32":
            published[where] = master[where]
        else:
            lane = Lane(settings["seed"], number, "download")
            sent = payloads.encode(master[where] - before.published[where], download, lane)
            arrived = payloads.decode(sent, download, len(fragment.span))
            published[where] = before.published[where] + arrived
        self._ticks += len(folded)
        self.versions.append(
            Version(number, master, published, slots, digest_of(master), digest_of(published))
        )
        return folded


Slot = Callable[[str], Floats]


def _mean(deltas: list[Floats], tokens: list[int], weighting: str) -> Floats:
    weights = [1 if weighting == "equal" else count for count in tokens]
    terms = [delta * F(weight) for delta, weight in zip(deltas, weights, strict=True)]
    mean: Floats = functools.reduce(operator.add, terms) / F(sum(weights))
    return mean


def _factor(staleness: int, tokens: int, settings: dict[str, Any]) -> np.float32:
    """What one contribution of several that are not averaged counts with."""
    found = np.float64(1)
    if settings["staleness_weighting"] == "inverse_sqrt":
        found = found / np.sqrt(np.float64(1 + staleness))
    if settings["weighting"] == "tokens":
        whole = settings["sync_every"] * settings["inner"]["batch"] * BLOCK
        found = found * (np.float64(tokens) / np.float64(whole))
    return np.float32(found)


def _step(master: Floats, mean: Floats, slot: Slot, settings: dict[str, Any], step: int) -> None:
    """The published rules, one rounding per operation, in place.

    `mean` is the mean of a round, or one contribution; `step` counts the one or the other.
    """
    lr = settings["lr"]
    if settings["optimizer"] == "sgd":
        master -= mean * F(lr)
    elif settings["optimizer"] == "nesterov":
        m = slot("momentum")
        m *= F(settings["momentum"])
        m += mean
        master -= (mean + m * F(settings["momentum"])) * F(lr)
    elif settings["optimizer"] == "delayed_nesterov":
        m, b, delay = slot("momentum"), slot("buffer"), settings["delay"]
        master -= (mean / F(delay)) * F(lr)
        b += mean
        if not step % delay:
            m *= F(settings["momentum"])
            m += b / F(delay)
            master -= (m * F(settings["momentum"])) * F(lr)
            b[:] = 0
    else:
        b1, b2 = settings["beta1"], settings["beta2"]
        first, second = slot("first_moment"), slot("second_moment")
        first *= F(b1)
        first += mean * F(1 - b1)
        second *= F(b2)
        second += (mean * mean) * F(1 - b2)
        correction = (1 - _power(b2, step)) ** 0.5
        denominator = np.sqrt(second) / F(correction) + F(settings["eps"])
        master -= (first * F(lr / (1 - _power(b1, step)))) / denominator


def _power(factor: float, exponent: int) -> float:
    """By squaring, from the lowest bit on: the order of the multiplies is part of the rule."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= factor
        factor *= factor
        exponent >>= 1
    return result
