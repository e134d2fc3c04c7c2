"""What a model returns -> logits: architectures differ in how they wrap them."""

from torch import Tensor

from atoll.errors import ConfigError


def logits_of(output: object) -> Tensor:
    """The logits [B, T, vocab] in a model's output: a tensor, or an object with `.logits`."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"the model returned {type(output).__name__!r}; model(tokens) must return logits "
            f"[batch, length, vocab], or an object that has them as `.logits`"
        )
    return found
