"""Turn a Phi-4-multimodal checkpoint into a package that ONNX Runtime GenAI runs.

The functions behind the commands live in `phi4mm_export.pipeline`; errors in `phi4mm_export.errors`.
Importing this package loads neither torch nor onnxruntime.
"""

__version__ = "0.1.0"
