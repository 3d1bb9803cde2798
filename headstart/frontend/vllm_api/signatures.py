"""What Python would refuse with an error of its own: calls, copies, assignments."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, SupportsIndex, TypeVar

from headstart.errors import HeadstartError, RequestError
from headstart.frontend.vllm_api.rows import FixedError, Names, UncopiedError

__all__ = ["OfOneProcess", "check_calls", "refuse_changes"]

Owner = TypeVar("Owner", bound=type)


class OfOneProcess:
    """An object with a model's memory, or a thread, behind it: not copied, and not pickled.

    Its properties are not set either.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        raise UncopiedError(
            f"{name} belongs to the process that made it, and is neither copied nor pickled: "
            "hand over its arguments and make one where it is used"
        )

    def __setattr__(self, name: str, value: object) -> None:
        try:
            object.__setattr__(self, name, value)
        except AttributeError:
            if isinstance(getattr(type(self), name, None), property):
                _refuse_change(self, name)
            raise


def refuse_changes(kind: Owner) -> Owner:
    """A frozen dataclass that says in our words that it is one."""
    setattr(kind, "__setattr__", _refuse_change)  # noqa: B010 (mypy refuses such an assignment)
    setattr(kind, "__delattr__", _refuse_change)  # noqa: B010
    return kind


def _refuse_change(self: object, name: str, *_: object) -> NoReturn:
    owner = getattr(type(self), "_name", type(self).__name__)
    raise FixedError(
        f"{owner}.{name} tells what holds and cannot be changed: make another with other arguments"
    )


def check_calls(making: type[HeadstartError], **tables: Names) -> Callable[[Owner], Owner]:
    """Have a class and its public methods say in one sentence how they are called.

    Arguments that a signature does not take, or that it misses, raise `making` when an object is
    made and RequestError in its methods. A TypeError from within a method stays as it is.
    tables: the keywords of methods, by their names; one that is refused is told before what misses.
    """

    def decorate(kind: Owner) -> Owner:
        for name, member in list(vars(kind).items()):
            shown = f"{kind.__name__}.{name}"
            if name == "__init__":
                setattr(kind, name, _checked(member, kind.__name__, making))
            elif isinstance(member, classmethod) and not name.startswith("_"):
                setattr(kind, name, classmethod(_checked(member.__func__, shown, making)))
            elif inspect.isfunction(member) and not name.startswith("_"):
                setattr(kind, name, _checked(member, shown, RequestError, tables.get(name)))
        return kind

    return decorate


def _checked(
    function: Callable[..., Any],
    shown: str,
    error: type[HeadstartError],
    table: Names | None = None,
) -> Callable[..., Any]:
    signature = inspect.signature(function)
    allowed = ", ".join(_spell(parameter) for parameter in list(signature.parameters.values())[1:])

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as wrong:
                if table is not None:
                    table.read(kwargs)
                raise error(f"{shown}: {wrong}; allowed: {shown}({allowed})") from None
            raise

    return call


def _spell(parameter: inspect.Parameter) -> str:
    """A parameter without its annotation."""
    return str(parameter.replace(annotation=inspect.Parameter.empty))
