"""Image embeddings are looked for in a thread, while the requests that need them wait.

    asked ──▶ looked for ──▶ found, or known not to be there ──▶ taken by the step that encodes

A request that shows an image is scheduled once it is known what the tiers have of it; others run
meanwhile. What a request asked for is forgotten when it leaves; another that waits for the same
image then asks again.
"""

import threading
from contextlib import suppress

from torch import Tensor

from headstart.engine.images.encoder_cache import EncoderKey
from headstart.engine.tiering.image_rows import KeptRows

__all__ = ["ImageLoads"]

_MOST = 16  # images that are looked for, or found and not taken; more are loaded within a step


class ImageLoads:
    """Rows of a store that is asked ahead; an `EmbeddingStore` for one engine's thread."""

    def __init__(self, kept: KeptRows) -> None:
        self._kept = kept
        self._asked: dict[EncoderKey, None] = {}  # by whom asked first
        self._found: dict[EncoderKey, Tensor | None] = {}
        self._is_busy = False  # the thread is in the store
        self._closed = False
        self._lock = threading.RLock()  # not the condition: Ctrl-C in its `__exit__` would keep it
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    @property
    def are_under_way(self) -> bool:
        """True while an image is looked for."""
        return bool(self._asked)

    def is_coming(self, key: EncoderKey) -> bool:
        """True while it is not known what the store has of this image; asks at the first call."""
        with self._lock:
            if key in self._asked:
                return True
            if key in self._found or len(self._asked) + len(self._found) >= _MOST:
                return False
            if self._closed or not self._has_thread():
                return False
            self._asked[key] = None
            self._changed.notify_all()
        return True

    def _has_thread(self) -> bool:
        """Start the thread if it does not run; False if the machine has no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="headstart-images", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def load(self, key: EncoderKey) -> Tensor | None:
        """The embeddings `[rows, hidden]`; an image that was not asked for is waited for."""
        with self._lock:
            if key in self._found:
                return self._found.pop(key)
        return self._kept.load(key)

    def save(self, key: EncoderKey, rows: Tensor, seconds: float) -> None:
        """Keep embeddings that took so long to compute."""
        self._kept.save(key, rows, seconds)

    def forget(self, key: EncoderKey) -> None:
        """A request that asked for this image has left."""
        with self._lock:
            self._asked.pop(key, None)
            self._found.pop(key, None)

    def forget_all(self, timeout: float) -> bool:
        """Forget what was found, and wait for what is being loaded; False if that takes longer.

        What a farther tier has is saved in all: that is over then, too.
        """
        with self._lock:
            self._asked.clear()
            self._found.clear()
            return self._changed.wait_for(lambda: not self._is_busy, timeout)

    def wait(self, timeout: float) -> None:
        """Wait until nothing is looked for, or one more image is known."""
        with self._lock:
            known = len(self._found)
            self._changed.wait_for(
                lambda: not self._asked or len(self._found) > known or self._closed, timeout
            )

    def close(self, timeout: float) -> None:
        """Look for no more images. Idempotent."""
        with self._lock:
            self._closed = True
            self._asked.clear()
            self._found.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._asked and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                key = next(iter(self._asked))
                self._is_busy = True
            rows = None
            with suppress(BaseException):  # of a damaged object: the image is encoded
                rows = self._kept.load(key)
            with self._lock:
                self._is_busy = False
                if key in self._asked:
                    self._found[key] = rows
                    del self._asked[key]
                self._changed.notify_all()
