"""One layer of a dense decoder."""

from torch import Tensor

from headstart.models.dense.mixers import MIXERS
from headstart.models.dense.modules import (
    ACTIVATIONS,
    MLP,
    Attention,
    FamilyModule,
    LayerStep,
    RMSNorm,
)
from headstart.models.shapes import DecoderShape
from headstart.weights.reader import Reader


class DecoderLayer(FamilyModule):
    """Attention or a recurrent mixer, then an MLP, each with a residual connection.

    The family decides whether each has a norm before it, after it, or both. With
    `DecoderShape.layer_inputs`, each token also has a second embedding. It is multiplied by a gate
    that is computed from the rows. The product is projected, normalized and added to the rows last.
    """

    def __init__(self, shape: DecoderShape, index: int, name: str, read: Reader) -> None:
        super().__init__(shape)

        def norm(part: str) -> RMSNorm:
            return RMSNorm(
                read.vector(f"{name}.{part}", shape.hidden_size), shape.epsilon, shape.norm
            )

        mixer = shape.layers[index].mixer
        self.is_recurrent = mixer is not None
        if mixer is not None:
            self.mixer = MIXERS[type(mixer)](shape, index, f"{name}.mixer", read)
        else:
            self.self_attn = Attention(shape, index, f"{name}.self_attn", read)
        self.mlp = MLP(shape, index, f"{name}.mlp", read)
        self._norms = shape.norms
        if shape.norms != "after":
            self.input_layernorm = norm("input_layernorm")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        if shape.norms == "around":
            self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        if shape.norms != "before":
            self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self._scale = shape.residual_scale
        self._scalar = 1.0
        if shape.layer_scalars:
            self._scalar = float(read.tensor(f"{name}.layer_scalar", (1,)))
        self._index, self._activation = index, ACTIVATIONS[shape.activation]
        self._has_input = shape.layer_inputs is not None
        if shape.layer_inputs is not None:
            hidden, width = shape.hidden_size, shape.layer_inputs.width
            gate, projection = f"{name}.per_layer_input_gate", f"{name}.per_layer_projection"
            self.per_layer_input_gate = read.linear(gate, hidden, width, bias=False)
            self.per_layer_projection = read.linear(projection, width, hidden, bias=False)
            self.post_per_layer_input_norm = norm("post_per_layer_input_norm")

    def forward(self, x: Tensor, step: LayerStep, output_rows: Tensor | None = None) -> Tensor:
        """Return the rows `[rows, hidden]` after the layer, or only `output_rows` of them."""
        before, after, around = (self._norms == place for place in ("before", "after", "around"))
        attend = self.mixer if self.is_recurrent else self.self_attn
        update = attend(x if after else self.input_layernorm(x), step, output_rows)
        if not before:
            update = self.post_attention_layernorm(update)
        x = self._add(x if output_rows is None else x.index_select(0, output_rows), update)
        if before:
            update = self.mlp(self.post_attention_layernorm(x), step.hooked)
        else:
            update = self.mlp(self.pre_feedforward_layernorm(x) if around else x, step.hooked)
            update = self.post_feedforward_layernorm(update)
        x = self._add(x, update)
        if self._has_input:
            assert step.inputs is not None
            inputs = step.inputs[:, self._index]
            inputs = inputs if output_rows is None else inputs.index_select(0, output_rows)
            update = self._activation(self.per_layer_input_gate(x)).mul_(inputs)
            x = self._add(x, self.post_per_layer_input_norm(self.per_layer_projection(update)))
        return x if self._scalar == 1.0 else x * self._scalar

    def _add(self, x: Tensor, update: Tensor) -> Tensor:
        return x + (update if self._scale is None else update * self._scale)
