"""stub"""

import torch


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, key):
        flat = x.detach().reshape(-1).clone()
        group.all_reduce(key, flat).wait()
        return flat.view(x.shape)

    @staticmethod
    def backward(ctx, g):
        return g, None, None


def global_sum(x, group, key):
    return _Sum.apply(x, group, key)
