"""What a run's settings say about a codec; each codec's folder has the class of its own.

Kept apart from the codecs because settings are read where torch is not.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from atoll.settings import Choice

if TYPE_CHECKING:
    from atoll.codecs.base import Codec


Rounding = Literal["nearest", "stochastic"]


def _is_power_of_two(block: int) -> int:
    if block & (block - 1):
        raise ValueError("must be a power of two from 16 to 65536")
    return block


# Values that share a scale. A power of two divides a group; below 16 the scales take too much.
Block = Annotated[int, Field(ge=16, le=65536), AfterValidator(_is_power_of_two)]
Decay = Annotated[float, Field(gt=0, le=1)]


class CodecSettings(Choice):
    """How values travel in one direction."""

    key: ClassVar[str] = "codec"
    default: ClassVar[str] = "fp32"
    known: ClassVar[dict[str, type[Choice]]] = {}
    # Raise it when the codec writes other bytes for the same values: both sides compare it.
    version: ClassVar[int] = 1

    codec: str

    @property
    def keeps_residual(self) -> bool:
        """Whether an island adds what the codec dropped to its next displacement."""
        return False

    @property
    def residual_decay(self) -> float:
        """The share of a residual that is still added in the next round."""
        return 1.0

    def build(self) -> "Codec":
        """The codec itself; the first call loads it, and torch with it."""
        raise NotImplementedError(f"{type(self).__name__} names no codec")


class LossySettings(CodecSettings):
    """The settings that every lossy codec has."""

    error_feedback: bool = True  # upload only: the island carries what rounding lost
    decay: Decay = 1.0  # upload only: the share of it that is left a round later

    @property
    def keeps_residual(self) -> bool:
        return self.error_feedback

    @property
    def residual_decay(self) -> float:
        return self.decay
