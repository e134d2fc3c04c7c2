"""The codecs that a run can name: one line for each, and no other module names them all.

A codec is a folder: `settings`, whose class can be chosen once it is imported, `codec`, and `loops`
where it has compiled ones.
"""

from atoll.codecs.bf16.settings import Bf16Settings
from atoll.codecs.fp32.settings import Fp32Settings
from atoll.codecs.int8.settings import Int8Settings
from atoll.codecs.settings import CodecSettings

BUILT_IN: tuple[type[CodecSettings], ...] = (
    Fp32Settings,
    Bf16Settings,
    Int8Settings,
)
DEFAULT = Fp32Settings()


def versions() -> dict[str, int]:
    """The version of the bytes of every codec that can be chosen, by the codec's name."""
    return {name: CodecSettings.chosen({"codec": name}).version for name in CodecSettings.known}
