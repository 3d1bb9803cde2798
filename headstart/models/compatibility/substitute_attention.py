"""Temporary replacement of a model's attention, by which checks record its layers' calls."""

from collections import Counter

from torch import Tensor
from transformers import PreTrainedModel

from headstart.attention.register import AttentionCall, AttentionFunction, register, unregister
from headstart.errors import UnsupportedModelError
from headstart.models.transformers_backend.decoder import text_part

__all__ = ["Attending"]


class Attending:
    """A context in which `function` is the model's attention; counts its calls per layer."""

    def __init__(self, model: PreTrainedModel, function: AttentionFunction) -> None:
        self._model = text_part(model)
        self._function = function
        self.calls: Counter[int] = Counter()

    def __enter__(self) -> "Attending":
        self.name = register(self._count)
        self._model.set_attn_implementation(self.name)
        if self._model.config._attn_implementation != self.name:
            self.__exit__()
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does not take its attention from transformers' "
                "AttentionInterface"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation("eager")
        unregister(self.name)

    def _count(self, call: AttentionCall) -> Tensor:
        layer = getattr(call.layer, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedModelError(
                f"{type(call.layer).__name__} does not say which layer it is (layer_idx is {layer})"
            )
        self.calls[layer] += 1
        return self._function(call)
