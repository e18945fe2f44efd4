"""Turn a Phi-4-multimodal checkpoint into a package that ONNX Runtime GenAI runs.

The functions behind the commands live in `phi4mm_export.pipeline`; errors in `phi4mm_export.errors`.
Importing this package loads neither torch nor onnxruntime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phi4mm_export.spec.genai import GenaiConfigGenerator as GenaiConfigGenerator

__version__ = "0.1.0"
__all__ = ["GenaiConfigGenerator", "__version__"]


def __getattr__(name: str) -> Any:
    """Public names whose modules are imported when first asked for."""
    if name == "GenaiConfigGenerator":
        from phi4mm_export.spec.genai import GenaiConfigGenerator

        return GenaiConfigGenerator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
