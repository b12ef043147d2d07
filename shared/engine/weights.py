"""The weights of linear layers, laid out once for the matrix kernels of the CPU. It does not know the model, only the layers it is given.

Plain `F.linear` lays the weights out again at every call, which costs up to three times the reading of them. Here oneDNN does it
once, at loading; one layout serves a single row and a long prompt alike. The packed copy takes the place of the original, which
is freed unless something else, such as a tied embedding, still uses it.
"""

import logging
from collections.abc import Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from shared.errors import UnsupportedModel

Weights = Literal["native", "int8"]

_log = logging.getLogger(__name__)

# Measured (oneDNN 3, AVX-512): large weights stream 8 to 19% faster past four rows than past one or two, rounded ones 20%.
_PADDED_FROM_BYTES = 8 << 20
_PADDED_ROWS = 4
_ROUNDED_ROWS = 4096
_LARGEST = 127
_MIDDLE = 128  # of unsigned bytes: the zero of the activations


class PackedLinear(nn.Module):
    """A linear layer in oneDNN's own layout, bfloat16 or float32; equal to the plain one but for rounding.

    What follows a layer is done on its sums before they are rounded: that saves a pass over the output.

    Args:
        weight: [out_features, in_features].
        bias: [out_features].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def forward(self, inputs: Tensor, then: str = "none") -> Tensor:
        """[..., in_features] -> [..., out_features], with a function applied: `none` or `swish`."""
        num_rows = inputs.shape[-2]
        if num_rows == 0:
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(_padded(inputs, self.num_bytes), self._packed, self._bias, then, [], "")
        return output[..., :num_rows, :]

    def plus(self, inputs: Tensor, other: Tensor) -> Tensor:
        """The output plus `other`, which has its shape."""
        return self._with(inputs, other, "add")

    def times(self, inputs: Tensor, other: Tensor) -> Tensor:
        """The output times `other`, which has its shape."""
        return self._with(inputs, other, "mul")

    def _with(self, inputs: Tensor, other: Tensor, operation: str) -> Tensor:
        inputs, other, num_rows = _padded(inputs, self.num_bytes), _padded(other, self.num_bytes), inputs.shape[-2]
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(inputs, other, self._packed, self._bias, operation)
        return output[..., :num_rows, :]


class Int8Linear(nn.Module):
    """A linear layer of 8-bit weights with a scale per output and 8-bit activations with a scale per row, taken from the row itself.

    The sums are exact integers: what a row gets does not depend on its neighbours.

    Args:
        weight: [out_features, in_features], to be rounded.
        bias: [out_features].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.numel()
        self._bias = bias
        rounded, self._scales = _round_weight(weight)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._middle = torch.tensor(_MIDDLE + 0.5)  # the half makes the truncation to bytes a rounding
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if inputs.numel() == 0:
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        # The largest of a row becomes +-127. A row of zeros has no scale: whatever it becomes is multiplied by zero in the end.
        largest = torch.linalg.vector_norm(inputs, float("inf"), -1, keepdim=True, dtype=torch.float32)
        unsigned = torch.addcmul(self._middle, inputs.to(torch.float32), largest.reciprocal(), value=_LARGEST).to(torch.uint8)
        unsigned = _padded(unsigned, self.num_bytes)
        output: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            unsigned, 1 / _LARGEST, _MIDDLE, self._packed, self._scales, self._zeros, None, 1.0, 0, inputs.dtype, "none", [], ""
        )
        output = output[..., : inputs.shape[-2], :].mul_(largest)
        return output if self._bias is None else output.add_(self._bias)

    def plus(self, inputs: Tensor, other: Tensor) -> Tensor:
        """The output plus `other`, which has its shape."""
        return self.forward(inputs).add_(other)


class PackedGate(nn.Module):
    """silu(gate) * up, both from the same input and neither kept."""

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        super().__init__()
        self._gate, self._up = join([gate], PackedLinear), join([up], PackedLinear)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features of either]."""
        return self._up.times(inputs, self._gate.forward(inputs, "swish"))


class Int8Gate(nn.Module):
    """silu(gate) * up: one layer of both, so that the input is rounded once."""

    def __init__(self, gate: nn.Linear, up: nn.Linear) -> None:
        super().__init__()
        self._both = join([gate, up], Int8Linear)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features of either]."""
        gate, up = self._both.forward(inputs).chunk(2, -1)
        return nn.functional.silu(gate).mul_(up)


Linear = PackedLinear | Int8Linear
LinearT = TypeVar("LinearT", bound=PackedLinear | Int8Linear)


def gate_of(kind: type[Linear]) -> type[PackedGate | Int8Gate]:
    """The gated pair of layers that goes with a kind of layer."""
    return Int8Gate if kind is Int8Linear else PackedGate


def kind_for(model: nn.Module, weights: Weights) -> type[Linear] | None:
    """How the layers of a model are to be packed; None: not at all, as in float64, on another device or without the kernels.

    Raises:
        UnsupportedModel: int8 weights were asked for where they cannot be had.
    """
    kind: type[Linear] = Int8Linear if weights == "int8" else PackedLinear
    stored = {(weight.device.type, weight.dtype) for weight in model.parameters()}
    if all(device == "cpu" and _has_kernels(kind, dtype) for device, dtype in stored):
        return kind
    if weights == "int8":
        raise UnsupportedModel("int8 weights need a CPU with oneDNN, a PyTorch with its kernels, and bfloat16 or float32 for the rest of the model")
    return None


def _has_kernels(kind: type[Linear], dtype: torch.dtype) -> bool:
    """Whether this PyTorch has the operators that the layers call, found by tiny layers: they are its own affair, and may change with any version."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # untyped in PyTorch
        return False
    ones = torch.ones(1, 1, 16, dtype=dtype)
    same = nn.Linear(16, 16, bias=False, device="meta", dtype=dtype).to_empty(device="cpu").requires_grad_(False)
    nn.init.eye_(same.weight)
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        pairs = [(join([same], kind).plus(ones, ones), 2 * ones), (gate_of(kind)(same, same)(ones), nn.functional.silu(ones))]
        if all(torch.allclose(actual, expected, rtol=0.02) for actual, expected in pairs):
            return True
        why = "their results are wrong"
    except (AttributeError, RuntimeError, TypeError) as error:
        why = str(error)
    _log.warning("weights are not packed and steps take longer: the kernels of PyTorch %s are not as expected: %s", torch.__version__, why)
    return False


def pack_linears(model: nn.Module, kind: type[Linear]) -> None:
    """Packs every plain linear layer that the model has, in place."""
    packed: dict[nn.Linear, Linear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                if child not in packed:
                    packed[child] = join([child], kind)
                setattr(parent, name, packed[child])


def join(layers: Sequence[nn.Linear], kind: type[LinearT]) -> LinearT:
    """One layer in the place of several that read the same input; its output is theirs, one behind the other."""
    weights = [layer.weight.detach() for layer in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(layer.bias is None for layer in layers):
        return kind(weight, None)
    return kind(weight, torch.cat([weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]))


def _padded(inputs: Tensor, num_bytes: int) -> Tensor:
    """Few rows as some more, where the weights are so large that this is faster."""
    num_rows = inputs.shape[-2]
    if num_rows > _PADDED_ROWS // 2 or num_bytes < _PADDED_FROM_BYTES:
        return inputs
    return nn.functional.pad(inputs, (0, 0, 0, _PADDED_ROWS - num_rows))


def _round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weights [out_features, in_features] and their scales [out_features], a part at a time: the widest are large."""
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for first in range(0, len(weight), _ROUNDED_ROWS):
        rows = weight[first : first + _ROUNDED_ROWS].to(torch.float32)
        scale = rows.abs().amax(1).clamp_(min=1e-30).div_(_LARGEST)
        rounded[first : first + _ROUNDED_ROWS] = (rows / scale[:, None]).round_()
        scales[first : first + _ROUNDED_ROWS] = scale
    return rounded, scales
