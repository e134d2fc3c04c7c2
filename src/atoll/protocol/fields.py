"""What every message is made of: frozen, closed, with bounded fields."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

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


@dataclass(frozen=True)
class AtMost:
    """Of a tuple or a dict: how many items it has at most, known before any of them is looked at.

    Of a tuple whose items break a rule only the first is told: nobody makes a sentence for each.
    """

    items: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """The check of the length, then that of the items."""
        inner = cast(dict[str, Any], handler(source))
        inner["max_length"] = self.items  # told by the JSON schema
        if inner["type"] == "tuple":
            inner["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._check, cast(CoreSchema, inner))

    def _check(self, value: Any) -> Any:
        if isinstance(value, (list, tuple, dict)) and len(value) > self.items:
            raise PydanticCustomError(
                "too_long",
                "has {given} items and takes at most {limit}",
                {"given": len(value), "limit": self.items},
            )
        return value
