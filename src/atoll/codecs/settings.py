"""What a run's settings say about a codec; each codec's folder has the class of its own.

Kept apart from the codecs because settings are read where torch is not.
"""

from typing import TYPE_CHECKING, ClassVar

from atoll.settings import Choice

if TYPE_CHECKING:
    from atoll.codecs.base import Codec


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

    def build(self) -> "Codec":
        """The codec itself; the first call loads it, and torch with it."""
        raise NotImplementedError(f"{type(self).__name__} names no codec")


class LossySettings(CodecSettings):
    """The settings that every lossy codec has."""

    error_feedback: bool = True  # upload only: the island carries what rounding lost

    @property
    def keeps_residual(self) -> bool:
        return self.error_feedback
