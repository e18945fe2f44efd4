"""Contract files: which tensors cross the borders of a package's graphs, as data.

Three are shipped (`official`, `gated`, `mobius`, in spec/data); anybody can write another one of the same format
and judge packages by it. A symbolic dim named in `constants` is static; its value follows the model at hand.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from phi4mm_export.errors import Phi4mmError, UsageError, some
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.json_text import parse_object, read_bytes
from phi4mm_export.spec.on_disk import exists

SHIPPED = ("official", "gated", "mobius")
"""Names of the contracts that come with the tool."""
MODEL_SIZES = ("hidden_size", "vocab_size")
"""Constants that a contract file may also write as the real model's number, in place of the name."""
ELEMENT_TYPES = frozenset(
    (
        *("float16", "float", "bfloat16", "double", "bool", "string", "int4", "uint4"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    )
)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorContract(_Strict):
    """One input or output. `%d` in the name stands for the layer index when `per_layer` is set."""

    name: str
    dtypes: list[str] = Field(min_length=1)
    rank: int
    dims: list[int | str]
    required: bool
    per_layer: bool = False
    og_key: str | None = None
    og_fixed_name: bool = False
    official_dtype: str | None = None
    alt_rank: int | None = None
    alt_dims: list[int | str] | None = None
    note: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> TensorContract:
        if len(self.dims) != self.rank:
            raise ValueError(f"{self.name} has rank {self.rank} and {len(self.dims)} dims")
        unknown = sorted(set(self.dtypes) - ELEMENT_TYPES)
        if unknown:
            raise ValueError(f"{self.name} has unknown element types {some(unknown)}")
        if self.per_layer and "%d" not in self.name:
            raise ValueError(f"{self.name} is per layer and has no %d")
        return self

    def names(self, layers: int) -> list[str]:
        """The tensor names this row stands for in a decoder of `layers` layers."""
        return [self.name.replace("%d", str(layer)) for layer in range(layers)] if self.per_layer else [self.name]


class Overridable(_Strict):
    """Adapter inputs that have an initializer as their default (informative: such inputs are never required)."""

    present: str = ""
    kind: str = ""
    float_name: str = ""
    quantized_names: list[str] = []
    proj: dict[str, list[str]] = {}
    float_dims: dict[str, list[str]] = {}
    ranks: dict[str, int] = {}
    count: dict[str, int] = {}
    note: str = ""

    def matches(self, name: str) -> bool:
        """Whether an overridable input has one of the contract's adapter names, in its float or quantized form."""
        projections = sorted({item for items in self.proj.values() for item in items})
        pattern = re.escape(self.float_name).replace("%d", r"\d+")
        pattern = pattern.replace(re.escape("{proj}"), f"({'|'.join(map(re.escape, projections))})")
        for choice in re.findall(r"\{([^{}]+)\}", self.float_name):
            if "|" in choice:
                pattern = pattern.replace(re.escape("{" + choice + "}"), f"({choice})")
        endings = "|".join(re.escape(text.replace("<float_name>", "")) for text in self.quantized_names)
        return re.fullmatch(f"{pattern}({endings})?", name) is not None


class GraphContract(_Strict):
    """The border of one graph."""

    filename: str
    inputs: list[TensorContract]
    outputs: list[TensorContract]
    overridable: Overridable | None = None
    note: str = ""


class DtypeGroup(_Strict):
    """Tensors ("decoder.inputs_embeds", "*" stands for anything) that share one element type if `rule` says equal."""

    group: str
    members: list[str]
    rule: str

    @property
    def equal(self) -> bool:
        return self.rule.startswith("equal")


class ContractFile(_Strict):
    """A whole contract file."""

    format: Literal["phi4mm-contract/1"]
    variant: str
    package: str = ""
    sources: list[str] = []
    reading: dict[str, str] = {}
    min_runtime: str | None = None
    constants: dict[str, int] = {}
    dtype_groups: list[DtypeGroup] = []
    published_dtypes: dict[str, str] = {}
    graphs: dict[str, GraphContract]
    og_0_18: dict[str, Any] = {}

    @model_validator(mode="after")
    def _known_graphs(self) -> ContractFile:
        unknown = sorted(set(self.graphs) - {component.value for component in Component})
        if unknown:
            raise ValueError(f"unknown graphs {some(unknown)}, expected {some(Component)}")
        return self

    def named_dim(self, dim: int | str) -> int | str:
        """A dim with the real model's hidden or vocabulary size turned into its name; others unchanged."""
        for size in MODEL_SIZES:
            if dim == self.constants.get(size):
                return size
        return dim


def load_contract(name: str) -> ContractFile:
    """The shipped contract of this name, or the contract in the file of this path.

    Raises UsageError for a name that is neither, and for a file that does not hold a contract.
    """
    if name in SHIPPED:
        data = resources.files("phi4mm_export.spec").joinpath("data", f"contract-{name}.json").read_bytes()
        return _parse(data, f"contract {name}")
    path = Path(name)
    if not exists(path):
        raise UsageError(
            f"{name!r} is neither a shipped contract nor a file",
            where="--contract",
            fix=f"give {', '.join(SHIPPED)} or the path of a contract file",
        )
    return _parse(read_bytes(path, error=UsageError), path.name)


def _parse(data: bytes, where: str, error: type[Phi4mmError] = UsageError) -> ContractFile:
    document = parse_object(data, where, error=error)
    try:
        return ContractFile.model_validate(document)
    except ValidationError as err:
        faults = [f"{'.'.join(map(str, item['loc'])) or 'the file'}: {item['msg']}" for item in err.errors()]
        raise error(
            f"not a contract file: {len(faults)} faults: {some(faults, 3)}",
            where=where,
            fix="compare with the shipped contract-official.json",
        ) from err
