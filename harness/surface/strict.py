"""What keeps a gap in truetap's knowledge of a release from becoming a fact.

``NotUnderstood`` says that a release does something that nobody prepared for. It is raised where
code of the release reaches for a name, an attribute or an import, and where truetap has no word for
an outcome. ``section`` turns it into the error that a user sees.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from truetap.harness.errors import CouldNotRun
from truetap.harness.surface.package_index import ENGINE

if TYPE_CHECKING:
    from truetap.harness.surface.wheel import Source


class NotUnderstood(BaseException):
    """A release does something that truetap is not prepared for.

    Not an ``Exception``, so that no handler of the release can take it for one of its own errors.
    """


def section(derive: Callable[[Source], dict[str, Any]]) -> Callable[[Source], dict[str, Any]]:
    """Make ``derive`` raise ``CouldNotRun``, with release, file and line, for ``NotUnderstood``.

    The same goes for an exception that the release's own code raised and nobody expected.
    """

    @functools.wraps(derive)
    def derived(source: Source) -> dict[str, Any]:
        try:
            return derive(source)
        except (NotUnderstood, Exception) as error:
            place = _place(source, error)
            if isinstance(error, NotUnderstood):
                what = str(error)
            elif place:
                what = f"raises {error!r}"
            else:
                raise
            raise CouldNotRun(
                f"{ENGINE} {source.version}{place}: {what}",
                remedy=(
                    "this release moved or changed what truetap reads; read the file and extend "
                    "truetap.harness.surface"
                ),
            ) from error

    return derived


def file_name(source: Source, path: str) -> str:
    """Return the name under which code of the release's file ``path`` is compiled."""
    return f"{ENGINE}-{source.version}/{path}"


def _place(source: Source, error: BaseException) -> str:
    """Return file and line of the release's innermost code that took part; empty if none did."""
    head = file_name(source, "")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(head):
            return f", {frame.filename.removeprefix(head)} line {frame.lineno}"
    return ""


class Strict:
    """A stand-in: reaching for an attribute that it does not have is ``NotUnderstood``.

    An ``AttributeError`` would be taken for one that the release raises, on purpose or by mistake.
    """

    def __getattr__(self, name: str) -> Any:
        raise _lacks(type(self).__name__, name)


class Prepared(Strict):
    """A stand-in with the attributes given; ``reached`` collects the names that were read."""

    def __init__(self, name: str, /, **attributes: object) -> None:
        self._name, self._attributes = name, attributes
        self.reached: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.reached.add(name)
        if name in self._attributes:
            return self._attributes[name]
        raise _lacks(self._name, name)


def bare(cls: type, absent: tuple[str, ...] = (), /, **attributes: object) -> Any:
    """Return an instance of ``cls`` that has these attributes and was not initialised.

    Reaching for another is ``NotUnderstood``, unless it is known to be ``absent``.
    """

    def __getattr__(_self: object, name: str) -> Any:  # noqa: N807
        raise AttributeError(name) if name in absent else _lacks(cls.__name__, name)

    ready = type(cls.__name__, (cls,), {"__getattr__": __getattr__})
    # An abstract method that nobody calls must not keep the class from being used.
    ready.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    instance: Any = object.__new__(ready)
    vars(instance).update(attributes)
    return instance


def _lacks(owner: str, name: str) -> BaseException:
    if name.startswith("__"):
        return AttributeError(name)  # Python and msgspec ask whether there is such a protocol.
    return NotUnderstood(f"no stand-in for {owner}.{name}")


def silent(*_: Any, **__: Any) -> None:
    """Take the place of functions whose effect no fact shows."""
