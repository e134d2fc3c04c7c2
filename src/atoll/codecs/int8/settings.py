"""Settings of the int8 codec."""

from typing import TYPE_CHECKING, Literal

from atoll.codecs.settings import Block, LossySettings, Rounding

if TYPE_CHECKING:
    from atoll.codecs.int8.codec import Int8


class Int8Settings(LossySettings):
    """How many values share a scale, and how their quotients are rounded."""

    codec: Literal["int8"] = "int8"
    block: Block = 256
    rounding: Rounding = "nearest"

    def build(self) -> "Int8":
        from atoll.codecs.int8.codec import Int8

        return Int8(self.block, self.rounding)
