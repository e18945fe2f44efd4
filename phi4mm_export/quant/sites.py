"""Where a graph multiplies by a constant weight, and what can be quantized there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.graphs.fused import DOMAIN
from phi4mm_export.quant.graph import Graph, subgraphs
from phi4mm_export.quant.hidden_weights import MATRIX_RANK, HiddenWeights, in_functions
from phi4mm_export.quant.settings import QuantSettings

if TYPE_CHECKING:
    import onnx

ONNX_DOMAINS = ("", "ai.onnx")
PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul"})


@dataclass(frozen=True)
class Site:
    """One node that multiplies by a constant matrix.

    main: index of the main node that is or holds it. branch: the attribute of the If node's body it stands in, "" in
    the main graph. position: index within that graph. transposed: the weight is stored [N, K]. alpha: factor of the
    product (Gemm, FusedMatMul). flip_input: the node transposes its input. addend: Gemm's C. float_type: "float32" or
    "float16". rank: place among all products of the graph.
    """

    label: str
    main: int
    branch: str
    position: int
    weight: str
    input: str
    output: str
    K: int
    N: int
    transposed: bool
    float_type: str
    alpha: float = 1.0
    flip_input: bool = False
    addend: str = ""
    beta: float = 1.0
    rank: int = 0

    def matrix(self, graph: Graph) -> NDArray[np.float32]:
        """The weight as it acts, float32 [K, N], alpha included."""
        stored = graph.constant(self.weight).astype(np.float32)
        acting = stored.T if self.transposed else stored
        return np.ascontiguousarray(acting if self.alpha == 1.0 else acting * np.float32(self.alpha))

    @property
    def capture(self) -> tuple[int, str, str]:
        """Identity of its input: sites with the same capture share one Hessian."""
        return (self.main if self.branch else -1, self.branch, self.input)


@dataclass(frozen=True)
class LeftAlone:
    """A weight that stays in float, and why."""

    label: str
    weight: str
    K: int
    N: int
    nbytes: int
    reason: str
    rank: int


@dataclass(frozen=True)
class _Product:
    """A product wherever it stands. nested: not in the main graph or in a body of an If of the main graph."""

    main: int
    branch: str
    position: int
    node: onnx.NodeProto
    nested: bool
    own: Mapping[str, onnx.TensorProto]
    """Constants of the bodies around it."""


def find_sites(graph: Graph, settings: QuantSettings) -> tuple[tuple[Site, ...], tuple[LeftAlone, ...]]:
    """Sites to quantize in graph order, and the products with constants that stay as they are."""
    uses, hidden, labels = _uses(graph.model.graph), HiddenWeights(graph), set[str]()
    sites: list[Site] = []
    left: list[LeftAlone] = []
    products = list(_products(graph))
    for rank, product in enumerate(products):
        node, name = product.node, product.node.input[1] if len(product.node.input) > 1 else ""
        tensor = product.own.get(name, graph.constants.get(name))
        if tensor is None:
            found = hidden.of(node)
            if found is not None:
                left.append(_left_alone(_free_label(node.name or name, labels), found.tensor, found.reason, rank))
            continue
        label = _free_label(node.name or name, labels)
        site = _site(label, product, tensor, rank)
        reason = (
            ("stands in a nested body" if product.nested else "")
            or ("is a constant of a body" if name in product.own else "")
            or _refusal(graph, site, node, tensor, uses[name])
            or ("its input is a constant too" if {node.input[0]} & (graph.constants.keys() | product.own) else "")
            or ("is an input a caller may replace" if tensor.name in graph.overridable else "")
            or _not_wanted(label, node, settings)
        )
        if site is None or reason:
            left.append(_left_alone(label, tensor, reason or "is not a matrix", rank))
        else:
            sites.append(site)
    for label, found in in_functions(graph, PRODUCTS):
        left.append(_left_alone(_free_label(label, labels), found.tensor, found.reason, len(products) + len(left)))
    return tuple(sites), tuple(left)


def _free_label(wanted: str, taken: set[str]) -> str:
    """A label no other product has, and from now on nobody's."""
    label, number = wanted, 1
    while label in taken:
        number += 1
        label = f"{wanted}#{number}"
    taken.add(label)
    return label


def _left_alone(label: str, tensor: onnx.TensorProto, reason: str, rank: int) -> LeftAlone:
    dims = list(tensor.dims)
    nbytes = int(np.prod(dims, dtype=np.int64)) * _itemsize(tensor)
    return LeftAlone(label, tensor.name, *_two(dims), nbytes, reason, rank)


def _products(graph: Graph) -> Iterator[_Product]:
    """All products, in the order they are computed."""
    for main, node in enumerate(graph.nodes):
        if _is_product(node):
            yield _Product(main, "", main, node, False, {})
        for branch, body in subgraphs(node):
            own = _own_constants(body)
            for position, inner in enumerate(body.node):
                if _is_product(inner):
                    yield _Product(main, branch, position, inner, node.op_type != "If", own)
                for deep, constants in _deeper(inner, own):
                    yield _Product(main, branch, position, deep, True, constants)


def _deeper(
    node: onnx.NodeProto, own: Mapping[str, onnx.TensorProto]
) -> Iterator[tuple[onnx.NodeProto, Mapping[str, onnx.TensorProto]]]:
    """Products in the bodies of a node at any depth, each with the constants of the bodies around it."""
    for _, body in subgraphs(node):
        constants = {**own, **_own_constants(body)}
        for inner in body.node:
            if _is_product(inner):
                yield inner, constants
            yield from _deeper(inner, constants)


def _own_constants(body: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Initializers of a body, and the tensors of its Constant nodes."""
    found = {tensor.name: tensor for tensor in body.initializer}
    for node in body.node:
        if node.op_type == "Constant" and node.domain in ONNX_DOMAINS:
            found.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    return found


def _is_product(node: onnx.NodeProto) -> bool:
    return node.op_type in PRODUCTS and (
        node.domain == DOMAIN if node.op_type == "FusedMatMul" else node.domain in ONNX_DOMAINS
    )


def _site(label: str, product: _Product, tensor: onnx.TensorProto, rank: int) -> Site | None:
    if len(tensor.dims) != MATRIX_RANK:
        return None
    import onnx

    node = product.node
    number = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    transposed = bool(number.get("transB", 0))
    rows, columns = (int(dim) for dim in tensor.dims)
    return Site(
        label=label,
        main=product.main,
        branch=product.branch,
        position=product.position,
        weight=tensor.name,
        input=node.input[0],
        output=node.output[0],
        K=columns if transposed else rows,
        N=rows if transposed else columns,
        transposed=transposed,
        float_type="float16" if tensor.data_type == onnx.TensorProto.FLOAT16 else "float32",
        alpha=float(number.get("alpha", 1.0)),
        flip_input=bool(number.get("transA", 0)),
        addend=node.input[2] if len(node.input) > MATRIX_RANK else "",
        beta=float(number.get("beta", 1.0)),
        rank=rank,
    )


def _refusal(graph: Graph, site: Site | None, node: onnx.NodeProto, tensor: onnx.TensorProto, uses: int) -> str:
    import onnx

    if site is None:
        return f"has {len(tensor.dims)} {'dim' if len(tensor.dims) == 1 else 'dims'}, not 2"
    if tensor.data_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
        return f"is {onnx.TensorProto.DataType.Name(tensor.data_type).lower()}, not float32 or float16"
    if uses > 1:
        return f"is used in {uses} places"
    if 0 in tensor.dims:
        return "is empty"
    if site.branch and (site.flip_input or site.addend):
        return "its node does more than multiply"
    if site.addend and site.beta and not _is_vector(graph.constants.get(site.addend), site.N):
        return "its Gemm adds more than a constant vector"
    if node.op_type == "FusedMatMul":
        number = {a.name: a.i for a in node.attribute if a.name.startswith("trans")}
        if number.get("transA") or number.get("transBatchA") or number.get("transBatchB"):
            return "its node transposes the input"
    return ""


def _is_vector(tensor: onnx.TensorProto | None, width: int) -> bool:
    """One value or one per output, as a row."""
    if tensor is None or math.prod(tensor.dims) not in (1, width):
        return False
    return math.prod(tensor.dims) == 1 or int(tensor.dims[-1]) == width


def _not_wanted(label: str, node: onnx.NodeProto, settings: QuantSettings) -> str:
    names = (label, node.name, node.input[1])
    if settings.include and not any(fnmatchcase(name, glob) for name in names for glob in settings.include):
        return "is not included"
    if any(fnmatchcase(name, glob) for name in names for glob in settings.exclude):
        return "is excluded"
    return ""


def _uses(graph: onnx.GraphProto) -> Counter[str]:
    """How often each value is read, graph outputs and bodies included."""
    count: Counter[str] = Counter(value.name for value in graph.output)
    for node in graph.node:
        count.update(name for name in node.input if name)
        for _, body in subgraphs(node):
            count += _uses(body)
    return count


def _two(dims: list[Any]) -> tuple[int, int]:
    """K and N of a stack of matrices, for reports."""
    return (int(dims[-2]) if len(dims) > 1 else 1, int(dims[-1]) if dims else 1)


def _itemsize(tensor: onnx.TensorProto) -> int:
    import onnx

    return int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
