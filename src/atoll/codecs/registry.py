"""Codecs by name: the one place that turns settings into a codec."""

from atoll.codecs.base import Codec
from atoll.codecs.bf16 import Bf16
from atoll.codecs.fp32 import Fp32
from atoll.codecs.int8 import Int8
from atoll.errors import ConfigError

# Of the bytes each codec writes. Another number for other bytes: both sides compare them.
VERSIONS = {"fp32": 1, "bf16": 1, "int8": 1}
KNOWN = tuple(VERSIONS)
NOT_BUILT = ("int4", "topk", "sign")


def build(name: str, *, rounding: str = "nearest", block: int = 256) -> Codec:
    """The codec of that name; `block` matters to int8 only.

    Raises ConfigError for a name or setting that is unknown, not built yet, or without effect.
    """
    if name in NOT_BUILT:
        raise ConfigError(f"codec {name!r} is not built yet; choose one of {', '.join(KNOWN)}")
    if name not in KNOWN:
        raise ConfigError(f"codec {name!r} is not known; choose one of {', '.join(KNOWN)}")
    if name == "bf16":
        return Bf16(rounding=rounding)
    if rounding != "nearest":
        raise ConfigError(
            f"codec {name!r} has no rounding={rounding!r}; "
            f"leave rounding at 'nearest' or choose bf16"
        )
    return Int8(block=block) if name == "int8" else Fp32()
