"""Streams of outputs, whoever ends them: the reader, an error, or the garbage collector."""

from abc import abstractmethod
from collections.abc import Generator
from typing import Any, TypeVar

__all__ = ["OutputStream"]

Output = TypeVar("Output")


class OutputStream(Generator[Output, None, None]):
    """The outputs of one request, which is submitted when the first of them is asked for.

    No generator function: the garbage collector would close it as a reader does, in whatever
    thread it runs, in the middle of whatever that thread does.
    """

    _ended = False

    @abstractmethod
    def _next(self) -> Output:
        """The next output; `_end` is called for the last."""

    @abstractmethod
    def _leave(self, *, collected: bool) -> None:
        """Forget the request if it was submitted.

        collected: the garbage collector calls. Only order it then: wait for nothing, and change
        nothing that a thread may be in the middle of.
        """

    def _end(self) -> None:
        """No more outputs. May be called again."""
        self._ended = True

    def send(self, value: None) -> Output:
        """The next output; `value` is ignored."""
        if self._ended:
            raise StopIteration
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def throw(self, *error: Any) -> Output:
        """Close the stream, then raise the error."""
        self.close()
        return super().throw(*error)

    def close(self) -> None:
        """Forget the request if it is unfinished; it holds nothing any more on return."""
        if not self._ended:
            self._leave(collected=False)
        self._end()

    def __del__(self) -> None:
        if not self._ended:
            self._leave(collected=True)
