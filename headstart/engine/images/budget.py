"""The encoder budget: how far a request with images is computed while the cache has room."""

from headstart.engine.images.encoder_cache import EncoderCache, PromptImage, PromptImages
from headstart.engine.request import Request
from headstart.errors import RequestError

__all__ = ["EncoderBudget"]


class EncoderBudget:
    """A limit: holds, for every running request, the images that its next tokens are made of.

    `block_size` is given in deterministic mode, where a step computes whole blocks anew: then
    the images of a block are needed until the block is done.
    """

    def __init__(self, cache: EncoderCache, block_size: int | None) -> None:
        self.cache = cache
        self._block_size = block_size

    def check(self, images: tuple[PromptImage, ...]) -> None:
        """Refuse images of which those needed at once cannot be had; raises RequestError."""
        for image in images:
            together = [
                other
                for other in images
                if other.start <= image.start and self._first(image.start) < other.stop
            ]
            rows = sum({other.key: other.image.num_rows for other in together}.values())
            if rows > self.cache.capacity:
                raise RequestError(
                    f"an image of {image.image.num_rows} embeddings needs {rows} at once, and "
                    f"the encoder cache holds {self.cache.capacity} (encoder_cache_rows)"
                )

    def applies(self, request: Request) -> bool:
        """A request with images is limited."""
        return bool(_images(request))

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        """Up to the first image that has no room; nothing yet while one is looked for in tiers."""
        waits = False
        needed: list[PromptImage] = []
        for at, image in enumerate(_images(request)):
            if image.start >= stop:
                break
            if image.stop > self._first(start):
                needed.append(image)
                if not self.cache.fits(needed):
                    return None if waits else max(start, image.start)
                waits |= self.cache.is_coming((request, at), image)
        return None if waits else stop

    def enter(self, request: Request, start: int, stop: int) -> None:
        """Hold the images of tokens `start` to `stop - 1`, leave earlier ones."""
        first = self._first(start)
        held: list[tuple[int, PromptImage]] = []
        for at, image in enumerate(_images(request)):
            if image.stop <= first:
                self.cache.leave((request, at), image)
            elif image.start < stop:
                held.append((at, image))
        # Those that are there first, so that making room for the others evicts none of them.
        for at, image in sorted(held, key=lambda pair: pair[1].key not in self.cache):
            self.cache.hold((request, at), image, is_stored=request.group.params.is_stored)

    def leave(self, request: Request) -> None:
        """Leave all of the request's images."""
        for at, image in enumerate(_images(request)):
            self.cache.leave((request, at), image)

    def _first(self, start: int) -> int:
        """The first position that is computed when `start` is."""
        return start if self._block_size is None else start // self._block_size * self._block_size


def _images(request: Request) -> tuple[PromptImage, ...]:
    extras = request.group.extras
    if extras is None or not isinstance(extras.embeddings, PromptImages):
        return ()
    return extras.embeddings.images
