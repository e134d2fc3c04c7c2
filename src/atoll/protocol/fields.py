"""What every message is made of: frozen, closed, with bounded fields."""

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# Strict: "1", 1.0 and true are no integers, nor are "1" and true numbers.
Whole = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Natural = Annotated[int, Field(strict=True, ge=1, le=2**53)]
WorkerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")]
# An island names a directory after it, so it holds nothing that a path gives a meaning to.
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


def _of_digits(value: object) -> object:
    """An address carries text alone, so there an integer is spelled in digits."""
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,16}", value) else value


OfQuery = BeforeValidator(_of_digits)  # for an integer of a message that travels in an address


class Message(BaseModel):
    """Frozen and closed: an unknown field is refused by its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")
