"""Imported by the process that ranks are forked from: loops are compiled once for all of them."""

import torch

from atoll.compiled.base import LARGE_ELEMENTS, compiled
from benchmarks import gather_rank

torch.set_num_threads(1)
assert gather_rank.LIMIT_SECONDS  # imported for its loops and libraries
compiled.prepare(LARGE_ELEMENTS)
compiled.wait()  # no thread may be left where a process is forked
