"""Checkpoint tensors as torch tensors of one float type, read when first asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from phi4mm_export.checkpoint.source import TensorSource

Array = NDArray[Any]

KEEP_BYTES = 48 * 2**30
"""Converted tensors held in memory; what exceeds this is read again at every use."""


def to_torch(array: Array) -> Tensor:
    """A numpy array as a torch tensor of the same type; bfloat16 (ml_dtypes) passes as its bits."""
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Weights:
    """Tensors by canonical name, converted to `dtype`.

    tensors: canonical name -> TensorSource, as `Checkpoint.tensors` holds them.
    """

    def __init__(
        self, tensors: Mapping[str, TensorSource], dtype: torch.dtype, *, keep_bytes: int = KEEP_BYTES
    ) -> None:
        self.dtype = dtype
        self._tensors = tensors
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._room = keep_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __call__(self, name: str) -> Tensor:
        """The whole tensor `name` in `dtype`."""
        return self.of(self._tensors[name])

    def of(self, source: TensorSource) -> Tensor:
        """The whole tensor behind `source` in `dtype`; for tensors outside the mapping (adapters)."""
        key = (str(source.file), source.stored_name)
        if key in self._kept:
            return self._kept[key]
        tensor = to_torch(source.whole()).to(self.dtype)
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes <= self._room:
            self._room -= nbytes
            self._kept[key] = tensor
        return tensor

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows `ids` (int64, any shape) of the matrix `name` [N, K] in `dtype` -> [*ids.shape, K].

        Reads those rows only: the embedding table of the real model has 1.2 GB.
        """
        source = self._tensors[name]
        unique, where = torch.unique(ids, return_inverse=True)
        picked = np.concatenate([source.rows(int(i), int(i) + 1) for i in unique])
        return to_torch(picked).to(self.dtype)[where]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """`x @ W.T + b` with `NAME.weight` [out, in] and, if stored, `NAME.bias` [out]."""
        bias = f"{name}.bias"
        return torch.nn.functional.linear(x, self(f"{name}.weight"), self(bias) if bias in self else None)

    def layer_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """LayerNorm over the last axis with `NAME.weight` and `NAME.bias`."""
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self(f"{name}.weight"), self(f"{name}.bias"), eps)


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis, computed in at least float32 as the original does."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.softmax(wide, -1).to(scores.dtype)


def lowest(dtype: torch.dtype) -> float:
    """The most negative finite number: the original's mask value (a fully masked row stays finite)."""
    return float(torch.finfo(dtype).min)
