"""Errors in the format and with the status codes of the called API."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Mount
from starlette.types import Scope

from headstart.engine.params import SamplingParams
from headstart.errors import (
    EngineError,
    HeadstartError,
    NoTokenError,
    PromptTooLongError,
    ReplicaLostError,
    RequestError,
    TierError,
)
from headstart.server.bodies import encode, refusals
from headstart.validation import in_one_line, shorten

_LOG = logging.getLogger("headstart.server")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_INSTEAD = refusals(
    {
        "only generation is supported; for embeddings or scores use transformers or "
        "sentence-transformers": (
            "/v1/embeddings /v2/embed /pooling /score /v1/score /rerank /v1/rerank /v2/rerank "
            "/classify /generative_scoring"
        ),
        "for speech call `/v1/chat/completions` of a model with speech output": (
            "/v1/audio/transcriptions /v1/audio/translations /v1/audio/speech"
        ),
        "adapters are loaded at startup, with `--lora-modules NAME=PATH`": (
            "/v1/load_lora_adapter /v1/unload_lora_adapter"
        ),
        "call `POST /cache/reset`": "/reset_prefix_cache /reset_mm_cache /reset_encoder_cache",
        "call `GET /health`": "/ping",
        "call `GET /metrics`": "/load",
        "`GET /openapi.json` has the version": "/version /server_info",
        "call `POST /tokenize` or `POST /detokenize`": (
            "/tokenizer_info /v1/completions/render /v1/chat/completions/render"
        ),
        "call `/v1/chat/completions` or `/v1/completions`": (
            "/invocations /inference/v1/generate /generate /v1/chat/completions/batch "
            "/v1/engines /chat/completions /completions"
        ),
        "there is no sleep mode; stop the server to free the memory": (
            "/sleep /wake_up /is_sleeping /pause /resume"
        ),
        "profile with py-spy": "/start_profile /stop_profile",
    }
)
"""Advice for paths of vLLM's and OpenAI's APIs that do not exist here."""


class ApiError(HeadstartError):
    """The error of a refused request: status, text, and the other fields of OpenAI's errors.

    param: the wrong field. retry_after: seconds, for the header `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        text: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"


class JsonResponse(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


def as_api_error(error: BaseException) -> ApiError:
    """Return the API error for an exception of the engine or of the framework.

    The texts of internal errors are only logged: they may contain data of another tenant whose
    request was in the same step, or names of local files.
    """
    try:
        if (refusal := _convert(error)) is not None:
            return refusal
    except Exception as fault:  # its traceback includes the traceback of `error`
        error = fault
    _LOG.error("a request failed: %s", error, exc_info=error)
    if isinstance(error, EngineError):
        return ApiError(500, "the engine failed; the server's log has the reason")
    return ApiError(500, "the server failed; its log has the reason")


def _convert(error: BaseException) -> ApiError | None:
    """Return the error to show to the client; None for an internal error."""
    text = str(error)
    match error:
        case ApiError():
            return error
        case PromptTooLongError():  # clients recognize this wording
            text += f"; this model's maximum context length is {error.max_model_len} tokens"
            return ApiError(400, text, code="context_length_exceeded")
        case NoTokenError():
            return ApiError(400, text)
        case RequestError():
            return ApiError(400, text, param=_param_of(text))
        case ReplicaLostError():
            return ApiError(503, text, code="replica_lost", retry_after=1)
        case TierError():
            return ApiError(503, text, code="tier_not_reset")
        case HTTPException():
            return ApiError(error.status_code, shorten(str(error.detail)))
        case RequestValidationError():
            return _read_validation(error)
    return None


def as_route_error(error: HTTPException, scope: Scope) -> ApiError:
    """Return the error for a request without a route."""
    path = scope["path"]
    if error.status_code == 404:
        advice = _INSTEAD.get(path.rstrip("/"))
        instead = advice.note if advice is not None else "GET /docs lists the paths"
        return ApiError(404, f"there is no {in_one_line(path)}: {instead}")
    if error.status_code != 405:
        return as_api_error(error)
    routes = [route for route in scope["app"].routes if not isinstance(route, Mount)]
    methods = [
        method
        for method in ("DELETE", "GET", "POST")
        for route in routes
        if route.matches({**scope, "method": method})[0] is Match.FULL
    ] or ["GET"]  # no route has this path, so it is a file of the page
    allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
    refusal = ApiError(405, f"the method is {scope['method']}; allowed at this path: {allowed}")
    refusal.headers["Allow"] = allowed
    return refusal


def _read_validation(error: RequestValidationError) -> ApiError:
    """Return the error for one mistake in a body.

    If a value may have several types, pydantic reports an error for each type. The error with the
    longest path into the value is used.
    """
    path = max(map(_path, error.errors()), key=len)
    first, *others = (each for each in error.errors() if _path(each) == path)
    if first["type"] == "json_invalid":  # its path ends in a text position instead of a field
        return ApiError(
            400, f"the body is not JSON, at character {first['loc'][-1]}: {first['ctx']['error']}"
        )
    *parents, name = map(str, path or ("",))
    param = _join_path([*parents, name])
    if first["type"] == "refused_field":
        text = first["msg"]
    elif first["type"] == "unknown_field":
        owner = _join_path(parents) or "the request"
        text = f"{owner} has the unknown field '{in_one_line(name)}'{first['msg']}"
    else:
        texts = dict.fromkeys(in_one_line(_describe(each)) for each in (first, *others))
        text = f"{param or 'the body'}: {' or '.join(texts)}"
    return ApiError(400, text, param=param or None)


def _describe(error: Mapping[str, Any]) -> str:
    """Return pydantic's text, or a clearer one for a missing or unknown `type`."""
    if error["type"] == "union_tag_invalid":
        context = error["ctx"]
        return f"the type is {context['tag']!r}; allowed: {context['expected_tags']}"
    if error["type"] == "union_tag_not_found":
        return f"an object has no {error['ctx']['discriminator']}"
    return str(error["msg"])


def _join_path(path: Iterable[str]) -> str:
    """Return the path of a field as OpenAI writes it."""
    return shorten(_INDEX.sub(r"[\1]", ".".join(path)))


def _path(error: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the path of the wrong field.

    pydantic's location also contains names of types, such as `list[str]`, and the tags of unions.
    These are left out. An error of `bodies.refuse` may name a field within the value.
    """
    path: list[Any] = []
    for before, part in zip((None, *error["loc"]), error["loc"], strict=False):
        is_tag = isinstance(before, int) and path[-2:-1] and path[-2] in _MIXED
        is_tag = is_tag or (before == "source" and part in _SOURCES)
        if isinstance(part, int) or not (is_tag or _TYPE.search(part)):
            path.append(part)
    field = (error.get("ctx") or {}).get("field")
    return (*path, field) if field is not None else tuple(path)


_MIXED = ("content", "input", "output")  # lists with several types of items
_SOURCES = ("text", "content", "base64", "url", "file")  # types of a document's source
_TYPE = re.compile(r"^(body|str|int|float|bool|[A-Z].*)$|\[")
_INDEX = re.compile(r"\.(\d+)(?=\.|$)")
_MESSAGE = re.compile(r"message (\d+) ")
_FIELD = re.compile(r"([a-z_]+)(\.[a-z_]+)* (is|are|has|needs|cannot)\b")
_FIELDS = (
    *("best_of", "cache_salt", "chat_template_kwargs", "continue_final_message", "messages"),
    *("priority", "prompt", "response_format", "suffix", "tool_choice", "tools"),
)
"""Fields outside of `SamplingParams` that errors name."""


def _param_of(text: str) -> str | None:
    """Return the request field at the beginning of an error's text; None if no field is there."""
    if message := _MESSAGE.match(text):
        return f"messages[{message[1]}]"
    match = _FIELD.match(text)
    is_field = match and (match[1] in _FIELDS or match[1] in SamplingParams.__dataclass_fields__)
    return match[1] if match and is_field else None


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Replace the name of a sampling parameter at the beginning of an error by the API's name.

    names: the API's names by fields of `SamplingParams`. `structured_outputs.json` is replaced like
    `structured_outputs`.
    """
    try:
        yield
    except RequestError as error:
        text = str(error)
        field = _SAMPLING_FIELD.match(text)
        if field is None or (name := names.get(field[1])) is None:
            raise
        raise ApiError(400, name + text[field.end() :], param=name) from error


_SAMPLING_FIELD = re.compile(r"(\w+)(\.\w+)?")


def body_of(error: ApiError, path: str = "", request_id: str = "") -> dict[str, Any]:
    """Return the body of an error in the API of this path."""
    text = shorten(str(error))
    kind = _TYPES.get(error.status, "invalid_request_error")
    if not path.startswith("/v1/messages"):
        return {"error": {"message": text, "type": kind, "param": error.param, "code": error.code}}
    if error.param is not None and text.startswith(error.param):  # `messages.0`, not `messages[0]`
        text = re.sub(r"\[(\d+)\]", r".\1", error.param) + text.removeprefix(error.param)
    kind = "request_too_large" if error.status == 413 else kind
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": request_id}
