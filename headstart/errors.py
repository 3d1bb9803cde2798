"""Every exception that headstart raises on purpose.

    HeadstartError
     ├ ConfigError             an option outside its range
     ├ RequestError            one request cannot be served: empty, bad parameter
     │  └ PromptTooLongError      the prompt is longer than the model's context
     ├ ModelError              a model cannot be loaded
     │  ├ ModelNotFoundError      wrong path, or a name that the hub does not provide
     │  ├ DamagedModelError       missing shard, truncated weights, broken JSON
     │  └ UnsupportedModelError   an architecture that cannot run, and the reason
     ├ AdapterError            a LoRA adapter cannot be loaded
     │  ├ AdapterNotFoundError    wrong path, or a folder without an adapter
     │  ├ DamagedAdapterError     truncated weights, broken JSON, configuration and weights differ
     │  └ UnsupportedAdapterError parts that cannot be added to this model, and the reason
     ├ OutOfMemoryError        not enough memory for the model, or for one request alone
     ├ CacheError              misuse of the cache manager: double free, unknown sequence
     └ EngineError             a step failed and its requests ended, or the engine is closed
        ├ NoTokenError            a request allows no next token; only this request ends
        ├ ReplicaLostError        the replica that answered died; only its own requests end
        └ TierError               after a reset, a tier may still hold blocks

The text of an error names the wrong value and the allowed range.
"""


class HeadstartError(Exception):
    """The base class of all exceptions that headstart raises on purpose."""


class ConfigError(HeadstartError, ValueError):
    """An option is outside its range."""


class RequestError(HeadstartError, ValueError):
    """One request cannot be served; nothing was allocated for it."""


class PromptTooLongError(RequestError):
    """The prompt is so long that no token of an answer fits into `max_model_len`."""

    def __init__(self, text: str, max_model_len: int = 0) -> None:
        super().__init__(text)
        self.max_model_len = max_model_len


class ModelError(HeadstartError):
    """A model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """The path does not exist, or the hub does not provide a model of this name."""


class DamagedModelError(ModelError):
    """Files of the model are missing, truncated or inconsistent."""


class UnsupportedModelError(ModelError):
    """headstart cannot run the model's architecture; the message has the reason."""


class AdapterError(HeadstartError):
    """A LoRA adapter cannot be loaded. Loaded adapters are not affected."""


class AdapterNotFoundError(AdapterError):
    """There is no adapter at this path."""


class DamagedAdapterError(AdapterError):
    """Files of the adapter are truncated, inconsistent, or changed after they were loaded."""


class UnsupportedAdapterError(AdapterError):
    """The adapter has parts that cannot be added to this model; the error's text has the reason."""


class OutOfMemoryError(HeadstartError, MemoryError):
    """Memory is too small for the model, or the whole block pool is too small for one request."""


class CacheError(HeadstartError):
    """The cache manager was misused. The failed call changed nothing."""


class EngineError(HeadstartError):
    """A step failed and its requests ended with this error, or the engine is closed."""


class NoTokenError(EngineError):
    """A request's options allow no next token. Only this request ended."""


class ReplicaLostError(EngineError):
    """The replica died while it computed the answer. The client may send the request again."""


class TierError(EngineError):
    """After a reset, a tier may still hold blocks. The blocks in memory were dropped."""


def engine_error(summary: str, cause: BaseException) -> EngineError:
    """Return the error of a request that ends because of `cause`."""
    error = EngineError(f"{summary}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
