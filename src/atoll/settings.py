"""What settings are made of: frozen, closed values, ranges of numbers, and choices of a class.

Needs no torch, so that every part of a run and every tool can read settings.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

Count = Annotated[int, Field(ge=1, le=2**53)]
Limit = Annotated[int, Field(ge=0, le=2**53)]  # 0: none
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


# The context in which settings are written for their hash; see `codecs.settings.LossySettings`.
HASHED = "hashed"


class Settings(BaseModel):
    """Frozen, closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Choice(Settings):
    """Settings with a key, such as `codec = "int8"`, whose value decides which others there are.

    A direct subclass (`CodecSettings`) names the key and its default. Each of its own subclasses
    gives the key one value, `codec: Literal["int8"] = "int8"`, adds the settings that go with it,
    and can be chosen as soon as it is defined. A field annotated with the direct subclass accepts a
    table, picks the class by the key and refuses settings that this class does not have. Annotate
    it as `SerializeAsAny`, or only the direct subclass's own fields would be written.
    """

    key: ClassVar[str]
    default: ClassVar[str]
    known: ClassVar[dict[str, type["Choice"]]]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        if not cls._is_open():
            cls.known[cls.model_fields[cls.key].default] = cls

    @classmethod
    def named(cls, name: object) -> type[Self] | None:
        """The class that the key's value `name` chooses, or None."""
        found = cls.known.get(name) if isinstance(name, str) else None
        return cast("type[Self] | None", found)

    @classmethod
    def chosen(cls, table: Mapping[str, Any]) -> type[Self]:
        """The class that `table` names by the key; refuses what that class does not have."""
        name = table.get(cls.key, cls.default)
        found = cls.named(name)
        if found is None:
            raise _refusal(cls.key, name, f"is not known; choose one of {', '.join(cls.known)}")
        for field in sorted(table.keys() - found.model_fields):
            has = ", ".join(sorted(found.model_fields))
            rule = f"is no setting of {cls.key} {name!r}, which has {has}"
            raise _refusal(field, table[field], rule)
        return found

    @classmethod
    def _is_open(cls) -> bool:
        """Whether this is a direct subclass, which leaves the key open and cannot be chosen."""
        return not isinstance(cls.model_fields[cls.key].default, str)

    @model_validator(mode="wrap")
    @classmethod
    def _choose(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, Mapping) and cls._is_open():
            return cls.chosen(value).model_validate(value)
        return handler(value)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        if cls._is_open():
            return {"oneOf": [known.model_json_schema() for known in cls.known.values()]}
        return handler(schema)


def _refusal(field: str, value: object, rule: str) -> ValidationError:
    """An error of pydantic's own kind, so that it names the section around `field` too."""
    # Braces in a template stand for values: the sentence goes in as one.
    told = PydanticCustomError("choice", "{rule}", {"rule": rule})
    details = InitErrorDetails(type=told, loc=(field,), input=value)
    return ValidationError.from_exception_data("settings", [details])
