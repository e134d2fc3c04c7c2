"""Settings of the fp32 codec."""

from typing import TYPE_CHECKING, Literal

from atoll.codecs.settings import CodecSettings

if TYPE_CHECKING:
    from atoll.codecs.fp32.codec import Fp32


class Fp32Settings(CodecSettings):
    """Lossless: there is nothing to choose."""

    codec: Literal["fp32"] = "fp32"

    def build(self) -> "Fp32":
        from atoll.codecs.fp32.codec import Fp32

        return Fp32()
