"""The one door to onnxruntime and onnxruntime-genai (og): every import of them goes through here.

onnxruntime starts its telemetry while it is imported (it writes a device id under the home directory, and users
report network traffic); the call that switches this off comes too late, so the environment variable is set first.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from phi4mm_export.errors import MissingExtraError, SystemLimitError

TELEMETRY_SWITCH = "ORT_DISABLE_TELEMETRY"
"""Read by onnxruntime when it is loaded; any user's own setting is left alone."""
GATED_GENAI_VERSION = (0, 14, 1)
"""The first og that feeds a phi4mm decoder its `input_ids`, which a gated decoder needs."""


def import_onnxruntime(purpose: str = "running graphs", *, cuda: bool = False) -> ModuleType:
    """The `onnxruntime` module with telemetry off; with `cuda`, its CUDA libraries are loaded first.

    Raises MissingExtraError when it is not installed, naming the extra that brings it.
    """
    os.environ.setdefault(TELEMETRY_SWITCH, "1")
    extra = "cuda" if cuda else "cpu"
    try:
        module = importlib.import_module("onnxruntime")
    except ImportError as err:
        raise MissingExtraError("onnxruntime", extra, purpose) from err
    if cuda and hasattr(module, "preload_dlls"):
        module.preload_dlls()
    return module


def import_genai(purpose: str = "generating text", *, cuda: bool = False) -> ModuleType:
    """The `onnxruntime_genai` module with telemetry off; on CUDA, onnxruntime's libraries are preloaded before it.

    Raises MissingExtraError when it is not installed, SystemLimitError when its native part does not load.
    """
    import_onnxruntime(purpose, cuda=cuda)
    try:
        return importlib.import_module("onnxruntime_genai")
    except ModuleNotFoundError as err:
        raise MissingExtraError("onnxruntime-genai", "cuda" if cuda else "cpu", purpose) from err
    except (ImportError, OSError) as err:
        raise SystemLimitError(
            f"onnxruntime-genai is installed, but its native library does not load: {first_line(err)}",
            fix="install onnxruntime and onnxruntime-genai of the same kind (both for CPU, or both for CUDA)",
        ) from err


def genai_version(genai: ModuleType) -> tuple[int, ...]:
    """og's version as numbers, `(0, 18, 0)`; a suffix such as `.dev1` is left out."""
    numbers: list[int] = []
    for part in str(genai.__version__).split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def native_faults(onnxruntime: ModuleType) -> tuple[type[Exception], ...]:
    """What onnxruntime's sessions raise: its status classes (no common base but Exception) and plain RuntimeErrors."""
    state = onnxruntime.capi.onnxruntime_pybind11_state
    names = ["Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NoModel", "NoSuchFile", "NotImplemented"]
    names += ["EPFail", "EngineError", "ModelLoaded", "RuntimeException"]
    classes = [getattr(state, name) for name in names if hasattr(state, name)]
    return (*classes, RuntimeError, ValueError)


def first_line(err: BaseException) -> str:
    """The first line of a native library's message, without its trailing period."""
    return (str(err).strip().splitlines() or [type(err).__name__])[0].rstrip(".")
