"""LoRA adapters in requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import RequestError
from headstart.validation import Number, check_absent, check_name, describe

__all__ = ["Adapter", "LoRARequest", "choose_adapters"]

_IDS = Number(int, 1)


@dataclass(frozen=True)
class LoRARequest:
    """An adapter in vLLM's form, loaded when it is first used. Raises RequestError.

    Adapters are identified by their content: `lora_int_id`, base_model_name and load_inplace have
    no effect. is_3d_lora_weight must be False.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path
    base_model_name: Any = field(default=None, compare=False, repr=False)
    load_inplace: Any = field(default=False, compare=False, repr=False)
    is_3d_lora_weight: bool | None = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_name("lora_name", self.lora_name, required=True)
        if self.lora_int_id not in _IDS:
            raise RequestError(f"lora_int_id is {describe(self.lora_int_id)}; allowed: {_IDS}")
        if not isinstance(self.lora_path, (str, Path)) or not str(self.lora_path):
            raise RequestError(
                f"lora_path is {describe(self.lora_path)}; allowed: the path of a folder"
            )
        check_absent({"is_3d_lora_weight": self.is_3d_lora_weight})

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
