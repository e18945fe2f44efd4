"""The linear algebra of the quantizer in torch, on the device that `--torch-device` names.

The algorithms are those of `hessian`, `arithmetic` and `gptq`, on whole matrices: float32 products of tokens summed in
float64, factors and errors in float64. The bits are those of the device's libraries, so that files made with them are
of the class same-machine. torch is imported when a device is opened, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import SystemLimitError, UsageError, install_line
from phi4mm_export.quant.arithmetic import PLAIN, Arithmetic, NotPositiveDefiniteError
from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.quant.gptq import FINALISTS, blocks_in
from phi4mm_export.quant.scales import Corner, candidates
from phi4mm_export.weights.exact import F32, F64

OPTION = "--torch-device"
LEAVE_OUT = f"leave {OPTION} out"
Tensor = Any
"""torch is optional and skipped by the type checker."""
ROWS = 1024
"""Tokens multiplied at once."""
TILE_OUTPUTS = 2048
"""Outputs of a weight rounded together: all scales of a block are tried at once, which takes 50 KB an output."""
MESSAGE_CHARACTERS = 200
"""What is shown of a message of torch, which may go on for lines."""


def open_device(name: str, *, where: str = "") -> TorchDevice:
    """The device of this name, after a first factor of a matrix there.

    Raises UsageError, naming `where` or the option, without torch and for what is no device that computes in float64.
    """
    place = where or f"{OPTION} {name}"
    try:
        import torch
    except ImportError as err:
        raise UsageError(
            "expected torch, which does this work, found that it is not installed",
            where=place,
            fix=f"run: {install_line('reference')}, or {LEAVE_OUT}",
        ) from err
    try:
        opened = TorchDevice(torch, torch.device(name))
        opened.factor(np.eye(2))
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, ImportError) as err:
        known = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise UsageError(
            f"expected a device on which torch {torch.__version__} computes in float64, found: {_in_a_line(err)}",
            where=place,
            fix=f"choose {' or '.join(known)}, or {LEAVE_OUT}",
        ) from err
    return opened


@contextmanager
def device_memory(name: str | None) -> Iterator[None]:
    """Inside, work that the device's memory does not hold raises a SystemLimitError that names the option."""
    try:
        yield
    except RuntimeError as err:
        text = str(err)
        if name is None or not any(word in text for word in ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")):
            raise
        raise SystemLimitError(
            f"expected a device that holds the matrices of a layer, found too little memory: {_in_a_line(err)}",
            where=f"{OPTION} {name}",
            fix=f"{LEAVE_OUT}, or choose a larger device",
        ) from err


@dataclass(frozen=True)
class TorchDevice:
    """torch, and the device on which it works."""

    torch: Any
    device: Any
    tile_outputs: int = TILE_OUTPUTS

    @property
    def identity(self) -> str:
        """Library and hardware, on which the bits depend."""
        kind = self.device.type
        hardware = self.torch.cuda.get_device_name(self.device) if kind == "cuda" else kind
        return f"{self.torch.__version__} on {hardware}"

    @property
    def arithmetic(self) -> Arithmetic:
        """Products with one large factor on the device; the small others, not worth the way there, in numpy."""
        return replace(PLAIN, coarsely=self._before, times=self._after)

    def there(self, x: NDArray[Any]) -> Tensor:
        """A copy on the device."""
        return self.torch.from_numpy(np.array(x, order="C")).to(self.device)

    @staticmethod
    def back(x: Tensor) -> NDArray[Any]:
        """A tensor as an array."""
        array: NDArray[Any] = x.cpu().numpy()
        return array

    def factor(self, h: F64) -> Tensor:
        """As `arithmetic.upper_factor`. Raises NotPositiveDefiniteError."""
        lower, info = self.torch.linalg.cholesky_ex(self.there(h[::-1, ::-1]))
        if int(info) or not bool(self.torch.isfinite(lower).all()):
            raise NotPositiveDefiniteError(f"pivot {len(h) - int(info)} is not a positive number")
        return lower.flip(0, 1)

    def solve(self, v: Tensor, right: F64) -> F64:
        """x with V V' x = right."""
        half = self.torch.linalg.solve_triangular(v, self.there(right), upper=True)
        return self.back(self.torch.linalg.solve_triangular(v.T, half, upper=False))

    def _before(self, right: F64) -> Callable[[F64], F64]:
        factor = self.there(right)
        return lambda left: self.back(self.there(left) @ factor)

    def _after(self, left: F64) -> Callable[[F64], F64]:
        factor = self.there(left)
        return lambda right: self.back(factor @ self.there(right))


class TorchSums:
    """`hessian.Sums` that stay on the device until the total is asked for."""

    rows = ROWS

    def __init__(self, on: TorchDevice, channels: int, weights: F32 | None) -> None:
        self._on, self._weights = on, None if weights is None else on.there(weights)
        outputs = channels if weights is None else weights.shape[1]
        self._wide, self._behind = on.there(np.zeros((channels, outputs))), on.there(np.zeros(outputs))

    def steps(self, left: F32, right: F32) -> list[Callable[[], None]]:
        """One step."""
        return [partial(self._add, left, right)]

    def total(self, sums: F64, mean: F64) -> F64:
        """As `hessian.Sums` says."""
        centred = self._wide - self._on.torch.outer(self._on.there(sums), self._on.there(mean))
        return self._on.back(centred.float().double())

    def behind(self) -> F64 | None:
        """As `hessian.Sums` says."""
        return None if self._weights is None else self._on.back(self._behind)

    def _add(self, left: F32, right: F32) -> None:
        x = self._on.there(left)
        y = x if right is left else self._on.there(right)
        if self._weights is not None:
            y = y @ self._weights
            self._behind += y.sum(dim=0, dtype=self._behind.dtype)
        self._wide += x.T @ y


@dataclass(frozen=True)
class _Block:
    """As in `gptq`: one quantization block in the order of rounding. v: its rows of V from the diagonal on."""

    number: int
    rows: slice
    v: Tensor
    corner: Corner

    @property
    def diagonal_block(self) -> Tensor:
        """[b, b]."""
        return self.v[:, : len(self.v)]


class TorchSolver:
    """`gptq.Solver` with all rows, scales and choices on the device."""

    def __init__(self, on: TorchDevice, block_size: int, order: NDArray[np.int64], v: Tensor) -> None:
        self._on, self._order = on, order
        self._blocks = [
            _Block(number, rows, v[rows, rows.start :], Corner.of(on.back(v[rows, rows])))
            for number, rows in blocks_in(order, block_size)
        ]

    def quantize(self, weight: F64, grid: Grid) -> Codes:
        """weight [K, N] in natural order -> codes in natural order."""
        size, width = weight.shape
        w = self._on.there(weight[self._order])
        left = self._on.torch.zeros_like(w)
        """Rows of V'E after a block: what the errors so far leave in them."""
        codes = np.empty((size, width), np.uint8)
        scales, zeros = np.empty((grid.blocks(size), width)), np.empty((grid.blocks(size), width), np.uint8)
        for block in self._blocks:
            rows, corner = block.rows, block.diagonal_block
            target = w[rows] + self._on.torch.linalg.solve_triangular(corner.T, left[rows], upper=False)
            q, scale, zero = self._round_block(target, block, grid)
            left[rows.stop :] += block.v[:, len(corner) :].T @ (w[rows] - q * scale)
            codes[self._order[rows]] = self._on.back((q + zero).byte())
            scales[block.number], zeros[block.number] = self._on.back(scale), self._on.back(zero)
        return Codes(grid, codes, scales.astype(grid.scale_type), None if grid.symmetric else zeros)

    def _round_block(self, target: Tensor, block: _Block, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """Codes minus zero [b, N], scale [N] and zero point [N]: of a few choices the one that ends best."""
        torch, width = self._on.torch, target.shape[1]
        scale, zero = (choices.ravel() for choices in self._best_choices(target, block.corner, grid))
        corner = block.diagonal_block
        feedback = (corner / corner.diagonal()).T
        several = target.tile(1, len(scale) // width)
        inverse, q, error = _inverse_of(scale), torch.empty_like(several), torch.empty_like(several)
        for i in range(len(several)):
            wanted = several[i] + feedback[i, :i] @ error[:i]
            q[i] = torch.clamp(torch.round(wanted * inverse), -zero, grid.top - zero)
            error[i] = several[i] - q[i] * scale
        loss = torch.linalg.vector_norm(corner.T @ error, dim=0).reshape(-1, width)
        best = loss.argmin(dim=0) * width + torch.arange(width, device=self._on.device)
        return q[:, best], scale[best], zero[best]

    def _best_choices(self, target: Tensor, corner: Corner, grid: Grid) -> tuple[Tensor, Tensor]:
        """As `scales.best_choices`: scales and zeros [choices, N], all choices tried at once."""
        on, torch = self._on, self._on.torch
        high, low = on.back(target.amax(dim=0)), on.back(target.amin(dim=0))
        tried = candidates(high, low, grid)
        _, exponent = np.frexp(np.maximum(high, -low))
        unit = np.ldexp(1.0, exponent)
        turned, scaled = on.there(corner.rough_for(grid)), target / on.there(unit)
        step = on.there((tried.scale / unit).astype(np.float32))[:, None]
        scale, zero = on.there(tried.scale), on.there(tried.zero)
        origin = zero.float()[:, None]
        q = torch.clamp(torch.round(scaled.float() * _inverse_of(step)), -origin, grid.top - origin)
        gap = (turned @ scaled).float() - (turned.float() @ q) * step
        loss = torch.linalg.vector_norm(gap, dim=1)
        best = torch.sort(loss, dim=0, stable=True).indices[:FINALISTS]  # the first of equal ones, as in numpy
        return torch.take_along_dim(scale, best, dim=0), torch.take_along_dim(zero, best, dim=0)


def _inverse_of(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale is 0."""
    return scale.reciprocal().masked_fill(scale == 0, 0.0)


def _in_a_line(err: Exception) -> str:
    return " ".join(str(err).split()).rstrip(".")[:MESSAGE_CHARACTERS]
