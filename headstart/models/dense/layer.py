"""One layer of a dense decoder."""

from torch import Tensor

from headstart.models.dense.mixers import make_mixer
from headstart.models.dense.modules import MLP, Attention, FamilyModule, LayerStep, RMSNorm
from headstart.models.shapes import DecoderShape
from headstart.weights.reader import Reader


class DecoderLayer(FamilyModule):
    """Attention or a recurrent mixer, then an MLP, each added to the rows.

    Norms stand where the family has them.
    """

    def __init__(self, shape: DecoderShape, index: int, name: str, read: Reader) -> None:
        super().__init__(shape)

        def norm(part: str) -> RMSNorm:
            return RMSNorm(
                read.vector(f"{name}.{part}", shape.hidden_size), shape.epsilon, shape.norm
            )

        self.is_recurrent = shape.layers[index].mixer is not None
        if self.is_recurrent:
            self.mixer = make_mixer(shape, index, f"{name}.mixer", read)
        else:
            self.self_attn = Attention(shape, index, f"{name}.self_attn", read)
        self.mlp = MLP(shape, f"{name}.mlp", read)
        self._norms = shape.norms
        if shape.norms != "after":
            self.input_layernorm = norm("input_layernorm")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        if shape.norms == "around":
            self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        if shape.norms != "before":
            self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self._scale = shape.residual_scale

    def forward(self, x: Tensor, step: LayerStep, kept_rows: Tensor | None = None) -> Tensor:
        """Return the rows `[rows, hidden]` after the layer, or only `kept_rows` of them."""
        before, after, around = (self._norms == place for place in ("before", "after", "around"))
        attend = self.mixer if self.is_recurrent else self.self_attn
        update = attend(x if after else self.input_layernorm(x), step, kept_rows)
        if not before:
            update = self.post_attention_layernorm(update)
        x = self._add(x if kept_rows is None else x.index_select(0, kept_rows), update)
        if before:
            update = self.mlp(self.post_attention_layernorm(x), step.hooked)
        else:
            update = self.mlp(self.pre_feedforward_layernorm(x) if around else x, step.hooked)
            update = self.post_feedforward_layernorm(update)
        return self._add(x, update)

    def _add(self, x: Tensor, update: Tensor) -> Tensor:
        return x + (update if self._scale is None else update * self._scale)
