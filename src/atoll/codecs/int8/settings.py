"""Settings of the int8 codec."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from atoll.codecs.settings import LossySettings

if TYPE_CHECKING:
    from atoll.codecs.int8.codec import Int8


def _is_power_of_two(block: int) -> int:
    if block & (block - 1):
        raise ValueError("must be a power of two from 16 to 65536; 256 is the default")
    return block


class Int8Settings(LossySettings):
    """How many values share a scale."""

    codec: Literal["int8"] = "int8"
    # A power of two divides a group; below 16 the scales take a fifth of a payload and more.
    block: Annotated[int, Field(ge=16, le=65536), AfterValidator(_is_power_of_two)] = 256

    def build(self) -> "Int8":
        from atoll.codecs.int8.codec import Int8

        return Int8(self.block)
