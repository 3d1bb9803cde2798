"""Every exception that headstart raises on purpose.

    HeadstartError
     ├ ConfigError             an option outside its range
     ├ RequestError            one request cannot be served: empty, bad parameter
     │  └ PromptTooLongError      the prompt is longer than the model's context
     ├ ModelError              a model cannot be loaded
     │  ├ ModelNotFoundError      wrong path, or a hub name without a network
     │  ├ DamagedModelError       missing shard, truncated weights, broken JSON
     │  └ UnsupportedModelError   an architecture that cannot work, and why
     ├ AdapterError            a LoRA adapter cannot be loaded
     │  ├ AdapterNotFoundError    wrong path, or a folder without an adapter
     │  ├ DamagedAdapterError     truncated weights, broken JSON, configuration and weights differ
     │  └ UnsupportedAdapterError parts that cannot be added to this model, and why
     ├ OutOfMemoryError        no memory for the model, or for even one such request
     ├ CacheError              misuse of the cache manager: double free, unknown sequence
     └ EngineError             a step failed and its requests ended, or the engine is closed
        ├ NoTokenError            a request's own bans leave no next token; it ends alone
        ├ ReplicaLostError        the replica that answered died; only its own requests end
        └ TierError               a tier may still hold blocks that it should have dropped

The text of an error holds the value that was wrong and the range that is allowed.
"""


class HeadstartError(Exception):
    """The root: catching it catches everything that headstart raises on purpose."""


class ConfigError(HeadstartError, ValueError):
    """An option is outside its range."""


class RequestError(HeadstartError, ValueError):
    """One request cannot be served; nothing was allocated for it."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer in `max_model_len` tokens."""

    def __init__(self, text: str, max_model_len: int = 0) -> None:
        super().__init__(text)
        self.max_model_len = max_model_len


class ModelError(HeadstartError):
    """A model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """There is no model at this path, or under this name without a network."""


class DamagedModelError(ModelError):
    """Files of the model are missing, truncated or not what they say."""


class UnsupportedModelError(ModelError):
    """The architecture cannot run over paged K/V; the text says why."""


class AdapterError(HeadstartError):
    """A LoRA adapter cannot be loaded; adapters loaded before are unchanged."""


class AdapterNotFoundError(AdapterError):
    """There is no adapter at this path."""


class DamagedAdapterError(AdapterError):
    """Files of the adapter are truncated, or do not say the same, or are not what they were."""


class UnsupportedAdapterError(AdapterError):
    """The adapter has parts that cannot be added to this model; the text says why."""


class OutOfMemoryError(HeadstartError, MemoryError):
    """Memory is too small for the model, or the empty block pool for one request."""


class CacheError(HeadstartError):
    """The cache manager was misused; it is as it was before the call."""


class EngineError(HeadstartError):
    """A step failed and its requests ended with this error, or the engine is closed."""


class NoTokenError(EngineError):
    """The bans of a request, or the form of its answer, leave no next token; it alone ended."""


class ReplicaLostError(EngineError):
    """The replica that computed an answer died in the middle of it; the request may come again."""


class TierError(EngineError):
    """A tier may still hold blocks that it should have dropped; those in memory are gone."""


def engine_error(summary: str, cause: BaseException) -> EngineError:
    """Return the error of a request that ends because of `cause`."""
    error = EngineError(f"{summary}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
