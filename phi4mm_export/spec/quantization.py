"""Words of a quantization that the command line, recipes, manifests and the quantizer share."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """How the codes are chosen."""

    GPTQ = "gptq"
    RTN = "rtn"
    NONE = "none"


class Order(StrEnum):
    """In which order GPTQ visits the input channels; the stored order never changes."""

    ACT = "act"
    NATURAL = "natural"


class Engine(StrEnum):
    """Who quantizes."""

    NATIVE = "native"
    ONNXRUNTIME = "onnxruntime"
    NEURAL_COMPRESSOR = "neural-compressor"
