"""The options of a server; command line flags are made from these fields."""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headstart.errors import ConfigError
from headstart.validation import Number, OneOf, check_fields, describe, option

_COUNTS = Number(int, 1)
MOST_LOGGED = 2048
"""Maximum number of characters of a prompt or an answer in a log line."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The address, limits, keys and logs of a server. Raises ConfigError."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: any free port", Number(int, 0, 65_535))
    served_model_name: str | None = option(
        None, "the model's name in the API; default: the name or path of the loaded model"
    )
    model_alias: tuple[str, ...] = option(
        (), "a further name of the model in the API; may be given several times"
    )
    any_model: bool = option(
        False, "answer requests for any model name; agents may request several models"
    )
    max_waiting: int = option(
        256,
        "maximum number of waiting requests; further requests are refused with status 429",
        _COUNTS,
    )
    max_requests_per_tenant: int | None = option(
        None,
        "maximum number of a tenant's requests in progress; default: half of the server's maximum",
        _COUNTS,
    )
    request_timeout: float = option(
        600.0, "seconds that a request may take, waiting included", Number(float, 0, above_low=True)
    )
    max_request_bytes: int = option(
        32 * 2**20, "maximum size of a request's body, in bytes", Number(int, 1024)
    )
    public_prefix: tuple[str, ...] = option(
        (),
        "file with text, or token ids (.json), whose K/V all tenants share when their prompts or "
        "system messages begin with it; may be given several times",
    )
    drain_seconds: float = option(
        30.0, "seconds for running requests to end when the server is stopped", Number(float, 0)
    )

    default_chat_template_kwargs: str | None = option(
        None,
        'default chat template options in JSON, such as {"enable_thinking": false}',
    )
    trust_request_chat_template: bool = option(
        False,
        "accept chat templates in requests; a template is a program and may run for a long time",
    )
    otlp_traces_endpoint: str | None = option(
        None, "URL that traces of requests are sent to, such as http://localhost:4318/v1/traces"
    )
    log_format: str = option(
        "text", "a line for each request: text, json, or off", OneOf(("text", "json", "off"))
    )
    log_texts: bool = option(
        False,
        f"log prompts and answers too, up to {MOST_LOGGED:,} characters of each",
    )

    api_keys: bool | None = option(
        None,
        "require a key; default: on if keys exist or if other machines can reach the address",
    )
    api_key: tuple[str, ...] = option(
        (),
        "an administrator's key; other users of this machine can see it, unless it is set in the "
        "environment; may be given several times",
    )
    keys_folder: str | None = option(None, "folder of the keys; default: in your data folder")

    tls_cert: str | None = option(None, "file with the certificate chain, for https; PEM")
    tls_key: str | None = option(None, "file with the certificate's private key; PEM")
    cors_origin: str | None = option(
        None,
        "origins whose pages may send requests: https://a.example, a comma-separated list, or *",
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "only one of tls_cert (or ssl_certfile) and tls_key (or ssl_keyfile) is set; "
                "allowed: both or none"
            )
        for name in ("model_alias", "public_prefix", "api_key"):
            if isinstance(getattr(self, name), str):  # each character would be a value
                raise ConfigError(f"{name} is a string; allowed: a tuple of strings")
        if not all(key and key == key.strip() for key in self.api_key):
            raise ConfigError(
                "api_key is empty or has white space around it, which HTTP headers drop; "
                "allowed: a string without white space around it"
            )
        if self.api_key and self.api_keys is False:
            raise ConfigError("api_key is set and api_keys is off; allowed: api_keys on")
        read_template_options(self.default_chat_template_kwargs)
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint is {describe(endpoint)}; allowed: a URL of http or https"
            )


def read_template_options(text: str | None) -> dict[str, Any]:
    """Return the options of chat templates from JSON. Raises ConfigError."""
    options: Any = None
    with suppress(ValueError, RecursionError):
        options = json.loads(text or "{}")
    if not isinstance(options, dict):
        raise ConfigError(
            f"default_chat_template_kwargs is {describe(text)}; allowed: an object in JSON, such "
            'as {"enable_thinking": false}'
        )
    return options
