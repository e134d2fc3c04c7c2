"""The three-pool example with rows that all count alike."""

from dataclasses import replace

import torch

from examples import three_pool
from examples.decomposition import T, V


def tokens(index, draw):
    return (draw.uniform(T) * V).long(), torch.ones(len(index), T, dtype=torch.bool)


top = three_pool.top.with_rows(12)
top.functions = {name: f for name, f in three_pool.top.functions.items() if name != "rows"}
top.functions["rows"] = replace(three_pool.top.functions["rows"], call=tokens)
