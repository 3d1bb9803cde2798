"""How a request says which LoRA adapter it wants."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.errors import RequestError
from headstart.frontend.vllm_api.calls import LORA
from headstart.frontend.vllm_api.sampling import take_vllm_names
from headstart.validation import Number, check_name, describe

__all__ = ["Adapter", "LoRARequest", "choose_adapters"]

_IDS = Number(int, 1)


@take_vllm_names(LORA, "lora_name", "lora_int_id", "lora_path")
@dataclass(frozen=True)
class LoRARequest:
    """vLLM's way to ask for an adapter: it is loaded when first asked for.

    `lora_int_id` is taken because vLLM asks for it; adapters are told apart by their content.
    Raises RequestError for a name or a path that is none, and for an id below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path

    def __post_init__(self) -> None:
        check_name("lora_name", self.lora_name, required=True)
        if self.lora_int_id not in _IDS:
            raise RequestError(f"lora_int_id is {describe(self.lora_int_id)}; allowed: {_IDS}")
        if not isinstance(self.lora_path, (str, Path)) or not str(self.lora_path):
            raise RequestError(
                f"lora_path is {describe(self.lora_path)}; allowed: the path of a folder"
            )

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str | Path:
        """`lora_path`."""
        return self.lora_path


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as it was loaded: its name, its folder, and the digest that its K/V go by."""

    name: str
    path: Path
    digest: str


def choose_adapters(
    adapter: str | Sequence[str | None] | None,
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    count: int,
) -> list[str | LoRARequest | None]:
    """The adapter of each of `count` prompts: one for all, or one each. Raises RequestError."""
    if adapter is not None and lora_request is not None:
        raise RequestError("give adapter or lora_request, not both")
    chosen = adapter if lora_request is None else lora_request
    if chosen is None or isinstance(chosen, (str, LoRARequest)):
        return [chosen] * count
    if not isinstance(chosen, Sequence) or isinstance(chosen, (bytes, bytearray)):
        raise RequestError(
            f"an adapter is asked for by name or LoRARequest, not {describe(chosen)}"
        )
    if len(chosen) != count:
        raise RequestError(f"{len(chosen)} adapters for {count} prompts")
    for choice in chosen:
        if choice is not None and not isinstance(choice, (str, LoRARequest)):
            raise RequestError(
                f"an adapter is {describe(choice)}; allowed: a name, a LoRARequest or None"
            )
    return list(chosen)
