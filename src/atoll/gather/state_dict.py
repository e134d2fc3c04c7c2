"""Accepted payloads as named lists, decoded when they are read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from atoll.codecs.topk.codec import TopK
from atoll.compiled.arrays import Bytes, Places
from atoll.gather.partial import bytes_of, chunks_of
from atoll.layout import Layout, TensorSpec

SUFFIXES = ("idxs", "vals", "quant_params")


class SliceSource(Protocol):
    """Payloads, read by position."""

    def read(self, uid: str, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of a payload, counted from its first chunk."""
        ...


@dataclass(frozen=True, eq=False)
class QuantParams:
    """What turns a parameter's codes into values: element i lies in chunk (offset + i) // 4096."""

    offset: int  # of the parameter's first element in its first chunk
    magnitudes: Bytes  # [chunks, 2], codes as `topk.magnitudes` spells them


Entry = Places | Bytes | QuantParams


@dataclass(frozen=True, eq=False)
class StateDict(Mapping[str, list[Entry]]):
    """`<p>idxs`, `<p>vals`, `<p>quant_params` -> a list aligned with `uids`, read from `source`.

    Indices count from the parameter's own first element; values are codes (`topk.support`). Only
    what is asked for is read and decoded, and nothing of it is kept.
    """

    layout: Layout
    codec: TopK
    uids: Sequence[str]
    source: SliceSource

    def __iter__(self) -> Iterator[str]:
        return (spec.name + suffix for spec in self.layout.tensors for suffix in SUFFIXES)

    def __len__(self) -> int:
        return len(self.layout.tensors) * len(SUFFIXES)

    def __getitem__(self, name: str) -> list[Entry]:
        for suffix in SUFFIXES:
            for spec in self.layout.tensors:
                if name == spec.name + suffix:
                    return [self._entry(uid, spec, suffix) for uid in self.uids]
        raise KeyError(name)

    def _entry(self, uid: str, spec: TensorSpec, suffix: str) -> Entry:
        chunks = chunks_of(spec, self.layout)
        data = self.source.read(uid, *bytes_of(spec, self.layout, self.codec))
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        support = self.codec.support(payload, len(chunks))
        offset = spec.span.start - chunks.start
        if suffix == "quant_params":
            return QuantParams(offset, support.magnitudes)
        inside = np.searchsorted(support.indices, [offset, offset + len(spec.span)])
        first, last = int(inside[0]), int(inside[1])
        if suffix == "vals":
            return support.codes[first:last]
        places: Places = support.indices[first:last] - np.int32(offset)
        return places
