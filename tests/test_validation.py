"""Every option is checked by the type and range of its field."""

import math
import sys
from dataclasses import Field, dataclass, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from headstart import LLM
from headstart.cache import CacheConfig
from headstart.engine.config import EngineConfig
from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, HeadstartError, ModelNotFoundError, RequestError
from headstart.omni.omni import Omni
from headstart.validation import Number, OneOf, check_fields, option

# None of them is a value of any option, save a string, a number and True of those of their type.
WRONG: list[Any] = [
    *("2", b"2", 2.5, True, math.nan, math.inf, -math.inf, [2], {"a": 1}, object(), np.ones(3)),
    *(2**63, 10**400, -(10**5000), np.int64(2), np.bool_(True), Decimal(2), Fraction(5, 2)),
]
OWN_CHECK = {
    "stop",
    "stop_token_ids",
    "output_kind",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
    "structured_outputs",
    "prediction",
}

Make = Any


def _engine(**options: Any) -> EngineConfig:
    return EngineConfig(**options)


def _cache(**options: Any) -> CacheConfig:
    return CacheConfig(**({"num_blocks": 4} | options))


def _sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**options)


CASES = [
    pytest.param(make, error, field, id=f"{kind.__name__}.{field.name}")
    for kind, make, error in (
        (EngineConfig, _engine, ConfigError),
        (CacheConfig, _cache, ConfigError),
        (SamplingParams, _sampling, RequestError),
    )
    for field in fields(kind)
    if field.name not in OWN_CHECK and field.type is not object
]


def _fits(name: str, kind: str, value: object) -> bool:
    """Return True if the annotation allows the value's type; another test covers ranges."""
    if name in ("logprobs", "prompt_logprobs") and value is True:
        return True  # is 1, as in vLLM
    names = {"int | str": int, "str": str, "bool": bool, "float": (int, float), "int": int}
    wanted = names[kind.removesuffix(" | None")]
    if isinstance(value, bool):
        return wanted is bool
    if not isinstance(value, wanted) or isinstance(value, str):
        return isinstance(value, wanted)
    return abs(value) <= (2**63 - 1 if wanted is int else sys.float_info.max)  # type: ignore


@pytest.mark.parametrize(("make", "error", "field"), CASES)
def test_a_value_of_another_type_is_refused(
    make: Make, error: type[Exception], field: Field[Any]
) -> None:
    """Regression: `LLM(num_threads="2")` raised a TypeError of a comparison or of torch."""
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
    kind = kind or str(field.type)
    values = [value for value in WRONG if not _fits(field.name, kind, value)]
    assert len(values) >= len(WRONG) - 4
    for value in values:
        with pytest.raises(error, match=rf"^{field.name} is .*; allowed: ") as raised:
            make(**{field.name: value})
        assert len(str(raised.value)) < 600
    if kind.endswith("| None"):
        make(**{field.name: None})
    else:
        with pytest.raises(error, match=f"^{field.name} is None; allowed: "):
            make(**{field.name: None})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"num_threads": "2"},
            "num_threads is '2'; allowed: a whole number from 1 to 1024",
        ),
        (
            {"num_threads": 10**400},
            "num_threads is an integer of 1329 bits; allowed: a whole",
        ),
        (
            {"max_model_len": 10**5000},
            "max_model_len is an integer of 16610 bits; allowed: ",
        ),
        ({"num_blocks": 0}, "num_blocks is 0; allowed: a whole number of at least 1 or None"),
        ({"max_bypassed": -1}, "max_bypassed is -1; allowed: a whole number of at least 0"),
        ({"kv_cache_fraction": 0}, "kv_cache_fraction is 0; allowed: a number above 0, up to 1"),
        ({"block_size": 3}, "block_size is 3; allowed: 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"block_size": True}, "block_size is True; allowed: 1, 2"),
        ({"dtype": "int8"}, "dtype is 'int8'; allowed: auto, float32, bfloat16, float16"),
        ({"device": 3}, "device is 3; allowed: a string"),
        ({"debug": 1}, "debug is 1; allowed: True or False"),
    ],
)
def test_errors_name_the_allowed_values(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^{complaint}"):
        LLM("headstart-tiny", **options)


@pytest.mark.parametrize("name", [f.name for f in fields(EngineConfig) if f.type != "str"])
def test_no_value_of_an_option_raises_a_foreign_error(name: str) -> None:
    """Regression: `num_threads=10**400` reached torch, which raised a ValueError."""
    for value in WRONG:
        with pytest.raises(HeadstartError):
            LLM("no such folder", **{name: value})
        with pytest.raises(HeadstartError):
            Omni("no such folder", options={name: value})


def test_no_bound_of_a_pipelines_store_raises_a_foreign_error() -> None:
    for value in [*WRONG, -1]:
        with pytest.raises(ConfigError, match=r"^cache_bytes is .*; allowed: a whole number of"):
            Omni("no such folder", cache_bytes=value)


@pytest.mark.parametrize(
    "model", [None, "", b"headstart-tiny", 3, "~no such user/model", "a" * 5000]
)
def test_an_invalid_model_is_refused(model: Any) -> None:
    """Regression: None raised a TypeError of pathlib; "" was the current folder."""
    with pytest.raises(ModelNotFoundError, match=r"allowed: a folder's path|there is no folder"):
        LLM(model)


@dataclass
class _Options:
    name: str = "a"
    size: int | None = option(None, "how much", Number(int, 1, 3))
    share: float = option(0.5, allowed=Number(float, 0, 1))
    kind: str | None = option("x", allowed=OneOf(("x", "y")))
    either: int | str = 3


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"name": None}, "name is None; allowed: a string"),
        ({"size": 4}, "size is 4; allowed: a whole number from 1 to 3 or None"),
        ({"size": 2.0}, "size is 2.0; allowed: a whole number"),
        ({"share": 10**400}, "share is an integer of 1329 bits; allowed: a number from 0 to 1"),
        ({"kind": "z"}, "kind is 'z'; allowed: x, y or None"),
    ],
)
def test_fields_are_checked(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{complaint}"):
        check_fields(_Options(**options), ValueError)


def test_valid_fields_are_accepted() -> None:
    check_fields(_Options(), ValueError)
    check_fields(_Options("b", 3, 1, None, either="text"), ValueError)


def test_a_number_without_a_range_is_an_internal_error() -> None:
    @dataclass
    class Unbounded:
        count: int = 3

    with pytest.raises(AssertionError, match="count: give its range"):
        check_fields(Unbounded(), ValueError)
