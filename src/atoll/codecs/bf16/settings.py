"""Settings of the bf16 codec."""

from typing import TYPE_CHECKING, Literal

from atoll.codecs.settings import LossySettings, Rounding

if TYPE_CHECKING:
    from atoll.codecs.bf16.codec import Bf16


class Bf16Settings(LossySettings):
    """How an fp32 value is rounded to its upper half."""

    codec: Literal["bf16"] = "bf16"
    rounding: Rounding = "nearest"

    def build(self) -> "Bf16":
        from atoll.codecs.bf16.codec import Bf16

        return Bf16(self.rounding)
