"""Settings of the topk codec."""

from typing import TYPE_CHECKING, Literal

from atoll.codecs.settings import Decay, LossySettings

if TYPE_CHECKING:
    from atoll.codecs.topk.codec import TopK


class TopKSettings(LossySettings):
    """The format is fixed. What is not sent stays in the residual, which is the momentum."""

    codec: Literal["topk"] = "topk"
    decay: Decay = 0.95  # SparseLoCo, arXiv 2508.15706

    def build(self) -> "TopK":
        from atoll.codecs.topk.codec import TopK

        return TopK()
