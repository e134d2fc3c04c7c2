"""The codecs that a run can name: one line for each, and no other module names them all.

A codec is a folder: `settings`, whose class can be chosen once it is imported, `codec`, and `loops`
where it has compiled ones. What several share stands beside the folders: `blocks`, `scaled`,
`pieces`, `tree`.
"""

from atoll.codecs.bf16.settings import Bf16Settings
from atoll.codecs.fp32.settings import Fp32Settings
from atoll.codecs.int4.settings import Int4Settings
from atoll.codecs.int8.settings import Int8Settings
from atoll.codecs.settings import CodecSettings
from atoll.codecs.sign.settings import SignSettings
from atoll.codecs.topk.settings import TopKSettings

BUILT_IN: tuple[type[CodecSettings], ...] = (
    Fp32Settings,
    Bf16Settings,
    Int8Settings,
    Int4Settings,
    SignSettings,
    TopKSettings,
)
DEFAULT = Fp32Settings()


def versions() -> dict[str, int]:
    """The version of the bytes of every codec that can be chosen, by the codec's name."""
    return {name: CodecSettings.chosen({"codec": name}).version for name in CodecSettings.known}
