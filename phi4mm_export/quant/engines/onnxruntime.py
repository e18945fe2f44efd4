"""onnxruntime's bundled MatMulNBitsQuantizer with our readers, its defects named.

For comparison, and for those who must make again what others published; use the native engine for anything else.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from phi4mm_export.errors import CheckpointError, MissingExtraError, UsageError
from phi4mm_export.package.write import WrittenFile, hashed
from phi4mm_export.quant.settings import CalibrationReader
from phi4mm_export.runtime.ort import first_line, import_onnxruntime
from phi4mm_export.spec.contract import data_file_name
from phi4mm_export.spec.on_disk import is_file

if TYPE_CHECKING:
    import onnx

GPTQ_DEFECTS = (
    "onnxruntime's GPTQ compensates no error (it reads the wrong triangle of the factor), so calibration data do not"
    " change its result; it rounds a second time with another scale, which makes it worse than rounding to nearest;"
    " it ignores nodes_to_exclude, and writes 4 bits when 8 are asked for"
)
OUTSIDE_NBYTES = 1024
"""Tensors from this size on go into the data file."""
ODD_BLOCKS = "onnxruntime cannot pack zero points for an odd number of blocks"


class OrtAlgorithm(StrEnum):
    """Algorithms of the bundled quantizer."""

    GPTQ = "gptq"
    RTN = "rtn"
    K_QUANT = "k_quant"
    HQQ = "hqq"


class _Feeds:
    """The bundled GPTQ iterates over its reader and copies its configuration deeply, which open files do not bear."""

    def __init__(self, reader: CalibrationReader, *, limit: int | None) -> None:
        self._reader, self._limit = reader, limit

    def __deepcopy__(self, memo: dict[int, Any]) -> _Feeds:
        return self

    def __iter__(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        rewind = getattr(self._reader, "rewind", None)
        if rewind is not None:
            rewind()
        count = 0
        while (self._limit is None or count < self._limit) and (sample := self._reader.get_next()) is not None:
            count += 1
            yield sample


def quantize_with_onnxruntime(
    source: Path,
    target: Path,
    *,
    algorithm: OrtAlgorithm,
    reader: CalibrationReader | None,
    block_size: int,
    symmetric: bool = True,
    accuracy_level: int = 0,
    limit: int | None = None,
) -> tuple[tuple[WrittenFile, ...], str]:
    """Write `target` and its data file with the bundled quantizer, 4 bits. -> (files, warning or "").

    limit: use only so many samples. Nodes without a name get one: the quantizer would lose them. Raises UsageError for
    GPTQ without samples, MissingExtraError for HQQ without torch, CheckpointError where the quantizer itself fails.
    """
    import onnx

    import_onnxruntime("quantizing with onnxruntime")
    from onnxruntime.quantization import matmul_nbits_quantizer as bundled

    if not hasattr(bundled, "MatMulNBitsQuantizer"):
        raise UsageError("this onnxruntime has no MatMulNBitsQuantizer", fix="install onnxruntime 1.22 or later")
    model = onnx.load(source)
    _name_nodes(model)
    config: Any = None
    if algorithm is OrtAlgorithm.GPTQ:
        if reader is None or next(iter(_Feeds(reader, limit=1)), None) is None:
            raise UsageError("GPTQ was asked for without calibration samples", fix="pass --calibration")
        config = bundled.GPTQWeightOnlyQuantConfig(calibration_data_reader=_Feeds(reader, limit=limit))
    elif algorithm is OrtAlgorithm.HQQ:
        config = bundled.HQQWeightOnlyQuantConfig(block_size=block_size, bits=4)
    elif algorithm is OrtAlgorithm.K_QUANT:
        config = bundled.KQuantWeightOnlyQuantConfig()
    quantizer = bundled.MatMulNBitsQuantizer(
        model, block_size=block_size, is_symmetric=symmetric, accuracy_level=accuracy_level or None, algo_config=config
    )
    logging.getLogger("onnxruntime.quantization").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantizer.process()
    except ImportError as err:
        raise MissingExtraError("torch", "inc", f"onnxruntime's {algorithm}") from err
    except (AssertionError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as err:
        hint = f" ({ODD_BLOCKS})" if "reshape" in str(err) else ""
        raise CheckpointError(
            f"onnxruntime's {algorithm} failed: {first_line(err)}{hint}",
            where=source.name,
            fix="use --engine native",
        ) from err
    data_name = data_file_name(target.name)
    _move_outside(quantizer.model.model, data_name)
    onnx.save(quantizer.model.model, target)
    written = [name for name in (data_name, target.name) if is_file(target.parent / name)]
    files = tuple(hashed(target.parent, name) for name in written)
    return files, GPTQ_DEFECTS if algorithm is OrtAlgorithm.GPTQ else ""


def _move_outside(model: onnx.ModelProto, data_name: str) -> None:
    """Mark large initializers as external data in `data_name`. `onnx.save` could do it, but it refuses a name that a
    file in the current folder has, whichever folder it saves to."""
    from onnx.external_data_helper import set_external_data

    for tensor in model.graph.initializer:
        if tensor.HasField("raw_data") and len(tensor.raw_data) >= OUTSIDE_NBYTES:
            set_external_data(tensor, data_name)


def _name_nodes(model: onnx.ModelProto) -> None:
    """Give every node of the main graph a name of its own."""
    taken = {node.name for node in model.graph.node}
    seen: set[str] = set()
    for index, node in enumerate(model.graph.node):
        if not node.name or node.name in seen:
            node.name = next(
                name for name in (f"{node.op_type}_{index}{'_' * n}" for n in range(9)) if name not in taken
            )
            taken.add(node.name)
        seen.add(node.name)
