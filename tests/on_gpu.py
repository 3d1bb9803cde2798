"""A pytest plugin that loads models on a GPU if a test names no device.

    python -m pytest -p tests.on_gpu tests/engine tests/omni

Without a GPU, one is simulated: a device named "gpu" whose tensors store their numbers on the CPU.
Like a GPU, it refuses operations over tensors of both devices, addresses, and conversion to numpy.
It does not simulate a GPU's kernels, rounding or streams.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_COPIES = {"aten::copy_", "aten::_to_copy"}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class GpuTensor(Tensor):
    """A tensor of the simulated GPU; `on_host` has its numbers."""

    on_host: Tensor

    @staticmethod
    def __new__(cls, on_host: Tensor, requires_grad: bool = False) -> "GpuTensor":
        with torch.inference_mode(False):  # a view of an ordinary tensor is ordinary
            tensor = Tensor._make_wrapper_subclass(
                cls,
                on_host.size(),
                strides=on_host.stride(),
                storage_offset=on_host.storage_offset(),
                dtype=on_host.dtype,
                device=torch.device("gpu", 0),
                requires_grad=requires_grad,
            )
        tensor.on_host = on_host
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        named = {name: value for name, value in (named or {}).items() if name != "pin_memory"}
        check_devices(operation, args, named)
        to_host = named.get("device") is not None and torch.device(named["device"]).type == "cpu"
        if "device" in named:
            named["device"] = torch.device("cpu")
        if operation is _aten.copy_.default and not isinstance(args[0], GpuTensor):
            return args[0].copy_(args[1].on_host)
        wrapped: dict[int, GpuTensor] = {}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, GpuTensor):
                return value
            wrapped[id(value.on_host)] = value
            return value.on_host

        inputs, options = tree_map(unwrap, args), tree_map(unwrap, named)
        if operation is _aten.histc.default:  # a GPU counts integers, too
            result = torch.histc(inputs[0].float(), *inputs[1:], **options).to(inputs[0].dtype)
        else:
            result = operation(*inputs, **options)

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, GpuTensor):
                return value
            if to_host:
                return value.clone() if id(value) in wrapped else value
            is_changed = operation._schema.is_mutable and id(value) in wrapped
            return wrapped[id(value)] if is_changed else GpuTensor(value)

        return tree_map(wrap, result)

    def tolist(self) -> Any:
        return self.on_host.tolist()

    def data_ptr(self) -> int:
        raise RuntimeError("the address of a tensor on a GPU")

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor on a GPU is not converted to numpy")

    __array__ = numpy


def check_devices(operation: Any, args: Any, named: Any) -> None:
    """Raise RuntimeError if an operation takes tensors of both devices, as a GPU does.

    A single number may be on the CPU, and so may the indices of a tensor on the GPU.
    """
    name = operation._schema.name
    if name in _COPIES:
        return
    tensors = [value for value in tree_leaves((args, named)) if isinstance(value, Tensor)]
    if name in _INDEXED:
        tensors = [value for value in (args[0], *args[2:3]) if isinstance(value, Tensor)]
    if any(not isinstance(tensor, GpuTensor) and tensor.dim() for tensor in tensors):
        places = [f"{tensor.device.type} {[*tensor.shape]}" for tensor in tensors]
        raise RuntimeError(f"{operation} over tensors of two devices: {', '.join(places)}")


class _DeviceModule:
    """The functions of a device that torch and transformers call."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...


_KERNELS = torch.library.Library("aten", "IMPL")


def simulate_gpu() -> None:
    """Give torch the device "gpu", for the rest of the process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("gpu", backend_module=_DeviceModule())

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return GpuTensor(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        return GpuTensor(torch.empty_strided(size, stride, dtype=dtype))

    def arange(*args: Any, dtype: Any = None, **_: Any) -> Tensor:
        return GpuTensor(torch.arange(*args, dtype=dtype))

    def copy_(target: Any, source: Any, non_blocking: bool = False) -> Any:
        numbers = source.on_host if isinstance(source, GpuTensor) else source
        target.on_host.copy_(numbers)
        return target

    kernels = {"empty.memory_format": empty, "empty_strided": empty_strided, "copy_": copy_}
    kernels |= dict.fromkeys(("arange", "arange.start", "arange.start_step"), arange)
    for name, kernel in kernels.items():
        _KERNELS.impl(name, kernel, "PrivateUse1")
    torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied


def pytest_configure() -> None:
    from headstart.models import dtypes

    find_device, device = dtypes.find_device, "cuda"
    if not torch.cuda.is_available():
        simulate_gpu()
        device = "gpu"

    def find_gpu(name: str) -> torch.device:
        return find_device(device if name == "cpu" else name)

    patch = pytest.MonkeyPatch()
    for module in ("models.loader", "omni.family"):
        patch.setattr(f"headstart.{module}.find_device", find_gpu)
