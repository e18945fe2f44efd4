"""What a quantization is asked for, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from phi4mm_export.errors import UsageError
from phi4mm_export.package.write import WrittenFile
from phi4mm_export.spec.quantization import Method as Method
from phi4mm_export.spec.quantization import Order as Order

BITS = (4, 8)
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""What MatMulNBits accepts. Source: ONNX Runtime, docs/ContribOperators.md."""
DEFAULT_DAMP = 0.01
"""Damping as a share of the mean diagonal of the Hessian. Source: GPTQ (arXiv 2210.17323), section 3.3."""


@dataclass(frozen=True)
class QuantSettings:
    """Every choice of a quantization; all of them are part of the cache keys.

    exclude, include: globs over node names and weight names. damp: share of the Hessian's mean diagonal.
    budget_nbytes: bytes all quantized weights may take together; layers that gain most get 8 bits.
    seed: of the random ids that `augment` draws; nothing else is random.
    augment: calibrate graphs that take token ids also on copies of the samples with random ids.
    rotate: mix groups of 128 input channels before each product, so that no single channel decides a block's scale.
    pad_for_cuda: widen hidden layers to what CUDA's fast kernel takes; computes the same.
    exact: from the calibration statistics on, the same bits on every BLAS kernel and for every number of its threads.
    torch_device: do the linear algebra of gptq in torch on this device, in arithmetic that is not exact.
    """

    method: Method = Method.GPTQ
    bits: int = 4
    block_size: int = 32
    symmetric: bool = True
    damp: float = DEFAULT_DAMP
    order: Order = Order.ACT
    sequential: bool = True
    bias_correction: bool = True
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    accuracy_level: int = 0
    budget_nbytes: int | None = None
    seed: int = 0
    jobs: int = 1
    exact: bool = True
    augment: bool = True
    rotate: bool = False
    pad_for_cuda: bool = False
    torch_device: str | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise UsageError(f"{self.bits} bits were asked for", fix="choose 4 or 8")
        if self.block_size not in BLOCK_SIZES:
            raise UsageError(
                f"a block size of {self.block_size} was asked for", fix=f"choose {', '.join(map(str, BLOCK_SIZES))}"
            )
        if not 0 < self.damp < 1:
            raise UsageError(f"a damping of {self.damp:g} was asked for", fix="choose a share between 0 and 1")
        if self.accuracy_level not in range(5):
            raise UsageError(f"accuracy level {self.accuracy_level} was asked for", fix="choose 0 to 4")
        if self.seed < 0:
            raise UsageError(f"the seed {self.seed} was asked for", fix="choose 0 or more")
        if self.jobs < 1:
            raise UsageError(f"{self.jobs} jobs were asked for", fix="choose 1 or more")
        if self.torch_device is not None:
            self._refuse_torch_device_beside_others(f"--torch-device {self.torch_device}")

    @property
    def device_kind(self) -> str | None:
        """The kind of the torch device, whichever of its kind it is: "cuda" of "cuda:1"."""
        return None if self.torch_device is None else self.torch_device.partition(":")[0]

    def _refuse_torch_device_beside_others(self, where: str) -> None:
        if self.method is not Method.GPTQ:
            raise UsageError(
                "expected the method gptq, which alone has linear algebra to do there, found another",
                where=where,
                fix="leave --torch-device out",
            )
        if self.exact:
            raise UsageError(
                "expected arithmetic whose bits may be those of the device, found exact arithmetic",
                where=where,
                fix="leave --torch-device out, or set exact=False",
            )


class CalibrationReader(Protocol):
    """onnxruntime's CalibrationDataReader protocol; `rewind()` is used where a reader has it."""

    def get_next(self) -> Mapping[str, NDArray[Any]] | None:
        """One sample (graph input name -> array), or None at the end."""
        ...


@dataclass(frozen=True)
class LayerReport:
    """What became of one weight.

    method_used: "gptq", "rtn" or "kept" (left in float). error_before, error_after: relative L2 error of the layer's
    own output over the calibration inputs, for rounding to nearest and for what was written; None without calibration.
    damp: the damping really added to the Hessian's diagonal, as a share of its mean. nbytes: codes, scales, zeros.
    """

    name: str
    weight: str
    K: int
    N: int
    bits: int
    block_size: int
    method_used: str
    reason: str
    damp: float
    error_before: float | None
    error_after: float | None
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class QuantResult:
    """The finished graph. `layers` in graph order; nbytes count the weights of these layers before and after."""

    layers: tuple[LayerReport, ...]
    files: tuple[WrittenFile, ...]
    nbytes_before: int
    nbytes_after: int
    samples: int
    reused: int = 0
    """Layers whose result was taken from the work folder."""
