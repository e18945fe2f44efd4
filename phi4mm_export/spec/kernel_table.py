"""Which operators have a kernel for which element types, per execution provider: ONNX Runtime's registry as data.

The tables in spec/data say how they were obtained and how to read them; this module is that rule in code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from phi4mm_export.spec.contract import Provider

TABLE_FILES = {Provider.CPU: "ort-cpu-kernels.json", Provider.CUDA: "ort-gpu-kernels.json"}
_FIXED = "tensor("
HETEROGENEOUS = frozenset({"ai.onnx::If", "ai.onnx::Loop", "ai.onnx::Scan"})
"""Operators whose variadic inputs and outputs may differ in type among themselves."""


@dataclass(frozen=True)
class Parameter:
    """One input or output of a schema: its name and its type parameter, or the type the schema fixes."""

    name: str
    type: str
    variadic: bool = False

    @property
    def fixed(self) -> str | None:
        """The element type the schema fixes ("int64"), or None for a type parameter."""
        return self.type[len(_FIXED) : -1] if self.type.startswith(_FIXED) else None


@dataclass(frozen=True)
class Schema:
    """One version of an operator."""

    since: int
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]

    @staticmethod
    def at(parameters: tuple[Parameter, ...], index: int) -> Parameter | None:
        """The parameter at a position; the last one repeats if it is variadic."""
        if index < len(parameters):
            return parameters[index]
        return parameters[-1] if parameters and parameters[-1].variadic else None


Binding = tuple[Parameter, str]
"""A parameter of a schema and the element type that a node has there."""


@dataclass(frozen=True)
class Kernel:
    """One registered kernel: opsets first..last (None: open) and the element types it takes by parameter."""

    first: int
    last: int | None
    types: Mapping[str, frozenset[str]]

    def covers(self, version: int) -> bool:
        return self.first <= version and (self.last is None or version <= self.last)

    def accepts(self, bound: Iterable[Binding]) -> bool:
        """A parameter the kernel does not name is unconstrained; it may name an input instead of a type parameter."""
        for parameter, dtype in bound:
            allowed = self.types.get(parameter.type, self.types.get(parameter.name))
            if allowed is not None and dtype not in allowed:
                return False
        return True


@dataclass(frozen=True)
class Operator:
    """Schemas (newest first) and kernels of one operator."""

    schemas: tuple[Schema, ...]
    kernels: tuple[Kernel, ...]

    def schema(self, opset: int) -> Schema | None:
        """The version with the largest `since` that is not above the opset."""
        return max((s for s in self.schemas if s.since <= opset), key=lambda s: s.since, default=None)

    def matching(self, schema: Schema, opset: int) -> list[Kernel]:
        """The kernels for this version of the operator."""
        return [kernel for kernel in self.kernels if kernel.covers(schema.since) or kernel.covers(opset)]


@cache
def kernel_table(provider: Provider) -> Mapping[str, Operator]:
    """ "domain::op_type" -> operator; the default domain is written ai.onnx."""
    text = resources.files("phi4mm_export.spec").joinpath("data", TABLE_FILES[provider]).read_text("utf-8")
    return {name: _operator(entry) for name, entry in json.loads(text)["ops"].items()}


@cache
def table_version(provider: Provider) -> str:
    """Version of ONNX Runtime the table was taken from."""
    text = resources.files("phi4mm_export.spec").joinpath("data", TABLE_FILES[provider]).read_text("utf-8")
    return str(json.loads(text)["onnxruntime"])


def _operator(entry: Mapping[str, Any]) -> Operator:
    schemas = [
        Schema(row["since"], _parameters(row["inputs"]), _parameters(row["outputs"])) for row in entry["schemas"]
    ]
    kernels = [
        Kernel(row["since"][0], row["since"][1], {name: frozenset(types) for name, types in row["types"].items()})
        for row in entry["kernels"]
    ]
    return Operator(tuple(schemas), tuple(kernels))


def _parameters(rows: Iterable[list[str]]) -> tuple[Parameter, ...]:
    return tuple(Parameter(row[0], row[1], len(row) > 2 and row[2] == "variadic") for row in rows)
