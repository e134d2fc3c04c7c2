"""Settings of the int4 codec."""

from typing import TYPE_CHECKING, Literal

from atoll.codecs.settings import Block, LossySettings, Rounding

if TYPE_CHECKING:
    from atoll.codecs.int4.codec import Int4


class Int4Settings(LossySettings):
    """How many values share a scale, and how their quotients are rounded."""

    codec: Literal["int4"] = "int4"
    block: Block = 128
    rounding: Rounding = "nearest"

    def build(self) -> "Int4":
        from atoll.codecs.int4.codec import Int4

        return Int4(self.block, self.rounding)
