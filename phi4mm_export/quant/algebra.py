"""Where the matrices of a stage lie, and what multiplies and solves them: numpy, or torch on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.quant.arithmetic import (
    EXACT,
    PLAIN,
    Arithmetic,
    solve_upper,
    solve_upper_transposed,
    upper_factor,
)
from phi4mm_export.quant.codes import Codes, Grid
from phi4mm_export.quant.gptq import Solver
from phi4mm_export.quant.hessian import Summing, sums_in_numpy
from phi4mm_export.quant.settings import QuantSettings
from phi4mm_export.quant.torch_device import TorchSolver, TorchSums, open_device
from phi4mm_export.quant.weight import TILE_OUTPUTS
from phi4mm_export.weights.exact import F64

Factor = Any
"""V upper triangular with H = V V': an array, or a tensor on a device."""


class Rounding(Protocol):
    """Rounds weights of one input, any number of them."""

    def quantize(self, weight: F64, grid: Grid) -> Codes:
        """weight [K, N] -> its codes."""
        ...


@dataclass(frozen=True)
class Algebra:
    """summing: makes the second moments. factor: of H; raises NotPositiveDefiniteError. solve: inv(H) right from H's
    factor. solver: from block size, order of channels and H's factor in that order. tile_outputs: outputs of a weight
    that are worked on together, at most."""

    math: Arithmetic
    summing: Summing
    factor: Callable[[F64], Factor]
    solve: Callable[[Factor, F64], F64]
    solver: Callable[[int, NDArray[np.int64], Factor], Rounding]
    tile_outputs: int


def algebra_of(settings: QuantSettings) -> Algebra:
    """What the settings ask for. Raises UsageError for a torch device that cannot be used."""
    if settings.torch_device is not None:
        on = open_device(settings.torch_device)
        return Algebra(
            on.arithmetic, partial(TorchSums, on), on.factor, on.solve, partial(TorchSolver, on), on.tile_outputs
        )
    math = EXACT if settings.exact else PLAIN

    def solve(v: F64, right: F64) -> F64:
        return solve_upper_transposed(v, solve_upper(v, right, math.coarse), math.coarse)

    def solver(block_size: int, order: NDArray[np.int64], v: F64) -> Solver:
        return Solver(block_size, math, order, v)

    factor = partial(upper_factor, math=math, jobs=settings.jobs)
    return Algebra(math, sums_in_numpy, factor, solve, solver, TILE_OUTPUTS)
