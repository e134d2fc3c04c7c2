"""The reference GPT: small, readable, without biases or dropout, so weights and rows fix the loss.

Owns the architecture and its loss. Initial weights are `init`'s; nothing here draws at random
beyond what PyTorch's own constructors do.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.errors import ConfigError
from atoll.models.logits import logits_of

NORM_EPS = 1e-5
MLP_RATIO = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The size of a GPT."""

    vocab: int
    block: int  # longest sequence
    layers: int
    heads: int
    width: int
    tied: bool = False  # the head shares the tokens' weight

    def __post_init__(self) -> None:
        if type(self.tied) is not bool:
            raise ConfigError(
                f"model.tied={self.tied!r} must be true or false: whether the head shares the "
                f"tokens' weight"
            )
        for name in (field.name for field in fields(self) if field.name != "tied"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:  # True is an int to isinstance
                raise ConfigError(
                    f"model.{name}={value!r} must be a whole number of at least 1; "
                    f"architecture 'gpt' needs it"
                )
        if self.width % self.heads:
            raise ConfigError(
                f"model.width={self.width} is not a multiple of model.heads={self.heads}; "
                f"each head needs the same share of the width"
            )


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)  # 3 x [B, T, width]
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        # [B, heads, T, width/heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two matrices with a GELU between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, MLP_RATIO * config.width, bias=False)
        self.project = nn.Linear(MLP_RATIO * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(F.gelu(self.expand(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A decoder-only transformer with learned positions.

    A tied head has no tensor of its own: its weight is named, and lies in the layout, as the
    tokens' alone.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocab] for the token after each of `tokens` [B, T]."""
        length = tokens.shape[1]
        if length > self.config.block:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than model.block={self.config.block}; "
                f"cut the data into shorter rows or raise model.block"
            )
        x = self.tokens(tokens) + self.positions.weight[:length]  # [B, T, width]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean negative log-likelihood, nats per token, of `rows` [B, block + 1]; for training."""
    logits = logits_of(model(rows[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def loss_sum(model: nn.Module, rows: Tensor) -> tuple[float, int]:
    """Summed negative log-likelihood (fp64) of `rows` [B, block + 1], and the tokens it is over."""
    logits = logits_of(model(rows[:, :-1]))
    targets = rows[:, 1:].flatten()
    total = F.cross_entropy(logits.flatten(0, 1).double(), targets, reduction="sum")
    return total.item(), targets.numel()
