"""Parameters as other pools see them: from the first replica of each block to every rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atoll.pools.arrows.base import Arrow, Meeting, packed, unpacked
from atoll.pools.desk import Desk


@dataclass(frozen=True, slots=True)
class Sheet:
    """One message: the trained tensors that one rank publishes to another."""

    source: int
    to: int
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Publication(Arrow):
    """At the start of every step, so that a newcomer's own weights are never used."""

    sheets: tuple[Sheet, ...]

    def meetings(self) -> Sequence[Meeting]:
        return [Meeting(self.name, (one.source, one.to), is_send=True) for one in self.sheets]

    def run(self, desk: Desk) -> None:
        """What is published is never rounded: it is the owner's weights, to the bit."""
        for sheet in self.sheets:
            if desk.seat.rank == sheet.source:
                with torch.no_grad():
                    flat = packed([desk.trained[name] for name in sheet.tensors])
                desk.world.send(desk.key(self.unit), flat, to=sheet.to).wait()
            elif desk.seat.rank == sheet.to:
                with torch.no_grad():
                    own = [desk.trained[name] for name in sheet.tensors]
                    flat = torch.empty_like(packed(own))
                    desk.world.receive(desk.key(self.unit), flat, source=sheet.source).wait()
                    for parameter, part in zip(own, unpacked(flat, own), strict=True):
                        parameter.copy_(part)
