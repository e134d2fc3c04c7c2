"""How loops are compiled: as they are written, without the interpreter's lock.

A loop is defined next to the torch code that computes the same. Importing it costs nothing: numba,
which is optional and takes a second to load, is imported when the first loop is compiled.
"""

from collections.abc import Callable
from functools import cached_property
from types import CellType, FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Loop(Generic[P, R]):
    """A function in numba's language: plain loops over slices, which become vector instructions.

    Its constants are fp32 or integers, because an fp64 one would make numba compute in fp64. It may
    call other loops that its module defines or imports above it. `examples` are arguments whose
    types it is compiled for; a loop without examples is called by other loops only and compiled
    together with them. A function that makes loops may hand them others, and numbers, by closure.
    """

    def __init__(self, function: Callable[P, R], examples: tuple[object, ...]) -> None:
        self._function = function
        self._examples = examples

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.machine_code(*args, **kwargs)
        return result

    @cached_property
    def machine_code(self) -> Any:
        """The function as numba runs it, compiled for its examples.

        No fastmath: every operation rounds on its own and none are joined, so the bits are those of
        IEEE 754 on every processor. Division by zero gives infinity or NaN, as in torch.
        """
        import numba

        compile_function: Any = numba.njit  # numba has no types
        type_of: Any = numba.typeof
        code = self._function.__code__
        names = {
            name: _as_numba_runs_it(value)
            for name, value in self._function.__globals__.items()
            if name in code.co_names or name == "__name__"
        }
        held = (cell.cell_contents for cell in self._function.__closure__ or ())
        closure = tuple(CellType(_as_numba_runs_it(value)) for value in held)
        plain = FunctionType(code, names, self._function.__name__, None, closure)
        made = compile_function(plain, nogil=True, error_model="numpy")
        if self._examples:
            made.compile(tuple(type_of(example) for example in self._examples))
        return made


def _as_numba_runs_it(value: object) -> object:
    """numba knows its own functions only: of a loop what it is compiled to, all else as it is."""
    return value.machine_code if isinstance(value, Loop) else value


LOOPS: list[Loop[..., Any]] = []  # of every module that was imported, in the order of definition


def loop(*examples: object) -> Callable[[Callable[P, R]], Loop[P, R]]:
    """Makes a function a loop; `compiled.base` says when it is compiled."""

    def made(function: Callable[P, R]) -> Loop[P, R]:
        new = Loop(function, examples)
        LOOPS.append(new)
        return new

    return made
