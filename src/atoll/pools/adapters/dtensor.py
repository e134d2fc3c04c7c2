"""Partial sums as DTensors and back: `Partial("sum")`, with the count that a DTensor has not.

A DTensor knows its reduction and its mesh, but neither what was summed nor how many of it; a
mean, a maximum, a whole or a shard of something is no partial sum, whatever it is called.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from atoll.errors import ProtocolError
from atoll.sums.partial import PartialSum


def to_dtensor(part: PartialSum, mesh: DeviceMesh) -> DTensor:
    """This rank's total as its part of a DTensor, which is the sum over `mesh`."""
    placements = [Partial("sum")] * mesh.ndim
    return DTensor.from_local(part.total, mesh, placements, run_check=False)


def from_dtensor(value: DTensor, *, count: int, unit: str) -> PartialSum:
    """This rank's part of a DTensor that waits for a sum over its mesh; shares its memory."""
    for placement in value.placements:
        if not isinstance(placement, Partial):
            raise ProtocolError(
                f"a DTensor placed as {placement} is no partial sum: ranks would add what "
                f"is whole, or parts of different places; hand over the gradient before it is "
                f"redistributed"
            )
        if placement.reduce_op != "sum":
            raise ProtocolError(
                f"a DTensor waits for {placement.reduce_op!r} over its mesh, and only a sum "
                f'carries an honest count; make it Partial("sum") and divide once, by the count'
            )
    return PartialSum(value.to_local(), count, unit)


def reduced(part: PartialSum, mesh: DeviceMesh) -> PartialSum:
    """Collective over `mesh`: the sum of totals and, as integers, of counts."""
    whole = [Replicate()] * mesh.ndim
    count = torch.tensor([part.count], dtype=torch.int64, device=part.total.device)
    counts = to_dtensor(PartialSum(count, part.count, part.unit), mesh).redistribute(mesh, whole)
    total = to_dtensor(part, mesh).redistribute(mesh, whole)
    return PartialSum(total.to_local(), int(counts.to_local()), part.unit)
