"""The matrices of a loaded model, by the names of its linear layers."""

from torch import nn

from headstart.weights.format import Linear, WeightFormat

__all__ = ["matrix_of", "quantized_matrices"]


def matrix_of(module: nn.Module) -> object:
    """Return the matrix of a linear layer or embedding; the module itself if it is torch's."""
    return getattr(module, "matrix", module)


def quantized_matrices(model: nn.Module) -> dict[str, WeightFormat]:
    """Return the matrices of linear layers that are not floats."""
    linears = {n: one.matrix for n, one in model.named_modules() if isinstance(one, Linear)}
    return {name: matrix for name, matrix in linears.items() if matrix.kind is not None}
