"""Components of a package, their file names, and the tensors that cross their borders."""

from __future__ import annotations

from enum import StrEnum


class Component(StrEnum):
    """The four graphs of a package."""

    DECODER = "decoder"
    VISION = "vision"
    SPEECH = "speech"
    EMBEDDING = "embedding"


class PackageLayout(StrEnum):
    """Where the graphs lie: `flat` as the published package, `nested` one folder per graph."""

    FLAT = "flat"
    NESTED = "nested"


FILE_NAMES: dict[PackageLayout, dict[Component, str]] = {
    PackageLayout.FLAT: {
        Component.DECODER: "phi-4-mm-text.onnx",
        Component.VISION: "phi-4-mm-vision.onnx",
        Component.SPEECH: "phi-4-mm-speech.onnx",
        Component.EMBEDDING: "phi-4-mm-embedding.onnx",
    },
    PackageLayout.NESTED: {
        Component.DECODER: "model/model.onnx",
        Component.VISION: "vision/model.onnx",
        Component.SPEECH: "speech/model.onnx",
        Component.EMBEDDING: "embedding/model.onnx",
    },
}


class FloatType(StrEnum):
    """Element type of activations, caches and features at run time."""

    FLOAT32 = "fp32"
    FLOAT16 = "fp16"


class Provider(StrEnum):
    """Execution providers a package can be built for."""

    CPU = "cpu"
    CUDA = "cuda"

    @property
    def float_type(self) -> FloatType:
        """The float type that follows the provider."""
        return FloatType.FLOAT16 if self is Provider.CUDA else FloatType.FLOAT32


def data_file_name(graph_file: str) -> str:
    """The external data file beside a graph: `NAME.onnx.data`."""
    return f"{graph_file}.data"
