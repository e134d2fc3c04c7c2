"""What every message is made of: frozen, closed, with bounded fields."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=0, le=2**53)]
WorkerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")]
# An island names a directory after it, so it holds nothing that a path gives a meaning to.
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Number = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Message(BaseModel):
    """Frozen and closed: an unknown field is refused by its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")
