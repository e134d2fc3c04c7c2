"""Settings of the sign codec."""

from typing import TYPE_CHECKING, Literal

from atoll.codecs.settings import Block, LossySettings

if TYPE_CHECKING:
    from atoll.codecs.sign.codec import Sign


class SignSettings(LossySettings):
    """How many values share a scale."""

    codec: Literal["sign"] = "sign"
    block: Block = 256

    def build(self) -> "Sign":
        from atoll.codecs.sign.codec import Sign

        return Sign(self.block)
