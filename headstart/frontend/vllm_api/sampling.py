"""What becomes of the fields of vLLM's `SamplingParams`, and of its beam search parameters."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

from headstart.errors import RequestError
from headstart.frontend.vllm_api.earlier import SAMPLING_REFUSED, STRUCTURED_REFUSED
from headstart.frontend.vllm_api.rows import Names, accepted, refused, works
from headstart.frontend.vllm_api.signatures import check_calls, refuse_changes
from headstart.validation import describe

__all__ = ["BEAM_SEARCH", "SAMPLING", "STRUCTURED", "take_vllm_names"]

Params = TypeVar("Params", bound=type)

_SAME = dict.fromkeys(
    [
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "min_p",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "structured_outputs",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
    ],
    "",
)

SAMPLING = Names(
    "SamplingParams",
    works(
        _SAME
        | {
            "n": "1 to 64",
            "top_k": "0 and -1 are all",
            "seed": "a request without one, or with -1, takes the engine's next",
            "logprobs": "0 to 1,000; -1 is the whole vocabulary, `True` is 1",
            "prompt_logprobs": "0 to 1,000; -1 is the whole vocabulary, `True` is 1",
            "detokenize": "",
            "output_kind": "`CUMULATIVE`, `DELTA`, `FINAL_ONLY`",
            "skip_reading_prefix_cache": "what it computes is cached all the same",
        }
    )
    | accepted(
        {
            "every request has a copy of its parameters": ["skip_clone"],
            "no plugin reads them": ["extra_args"],
            "the tokenizer decides": ["spaces_between_special_tokens"],
            "derived from `stop`": ["output_text_buffer_length"],
            "outputs hold one dict for each token": ["flat_logprobs"],
            "no routing data are returned": ["routed_experts_prompt_start"],
            "there is no watermark": ["watermarking"],
        }
    )
    | refused(
        {
            "ask for `prompt_logprobs=k` and read those you want": {
                "prompt_logprob_token_ids": (),
                "prompt_logprob_start": (0,),
            },
            "ask for `logprobs=-1` and read those you want": {"logprob_token_ids": ()},
            "every step is told; leave out those you do not want": {"stream_interval": (1,)},
            "bound the answer by `max_tokens`, or by a stop string": {
                "thinking_token_budget": (),
                "repetition_detection": (),
            },
            "give the forced tokens with the prompt and ask for `prompt_logprobs`": {
                "trace_decode_token_ids": ()
            },
        }
    )
    | refused(SAMPLING_REFUSED),
    RequestError,
    own=["logits_processors", "similar_images", "skip_storing_prefix_cache"],
)

BEAM_SEARCH = Names(
    "BeamSearchParams",
    works(
        dict.fromkeys(["beam_width", "max_tokens", "ignore_eos", "length_penalty"], "")
        | {
            "temperature": "",
            "skip_special_tokens": "",
            "include_stop_str_in_output": "",
        }
    )
    | accepted({"there is no watermark": ["watermarking"]})
    | refused(
        {
            "draw with `LLM.generate` instead": {
                "structured_outputs": (),
                "allowed_token_ids": (),
            }
        }
    ),
    RequestError,
)


STRUCTURED = Names(
    "StructuredOutputsParams",
    works(
        {
            "json": "also a pydantic model",
            "regex": "",
            "choice": "",
            "grammar": "",
            "json_object": "",
            "disable_any_whitespace": "",
            "disable_additional_properties": "",
            "whitespace_pattern": "default: a space, or a line's end and up to 20 of indentation",
            "structural_tag": "`structures` and `triggers`, as a dict or as text",
        }
    )
    | refused(STRUCTURED_REFUSED),
    RequestError,
)


def take_vllm_names(names: Names, *positional: str) -> Callable[[Params], Params]:
    """Let a dataclass be made with any name of vLLM's: those that need nothing are dropped.

    `positional` are the fields that may be given without their names. One that is frozen says so in
    our words, and one without a `__getattr__` what it has.
    """

    def missing(self: object, name: str) -> NoReturn:
        raise names.missing(name, dir(type(self)))

    def decorate(kind: Params) -> Params:
        if kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            refuse_changes(kind)
        if not hasattr(kind, "__getattr__"):
            setattr(kind, "__getattr__", missing)  # noqa: B010 (mypy refuses such an assignment)
        make: Callable[..., None] = vars(check_calls(RequestError)(kind))["__init__"]

        @wraps(make)
        def init(self: Any, *args: Any, **given: Any) -> None:
            if len(args) > len(positional):
                wrong = describe(args[len(positional)])
                raise RequestError(f"{names.owner} takes {wrong} by its name alone")
            first = dict(zip(positional, args, strict=False))
            for name in first.keys() & given.keys():
                raise RequestError(f"{names.owner} is given {name} twice")
            make(self, **names.read(first | given))

        setattr(kind, "__init__", init)  # noqa: B010 (mypy refuses a method's assignment)
        return kind

    return decorate
