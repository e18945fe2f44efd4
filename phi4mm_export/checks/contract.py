"""Judge the borders of a package's graphs by a contract: match, missing, extra, name, dtype, rank or dims differ.

Works on any team's package: sizes that belong to the model (hidden size, layers, heads, vocabulary) are taken from
the graphs at hand, so that only their agreement is judged.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from phi4mm_export.checks.opened import OpenedGraph, OpenedPackage
from phi4mm_export.checks.report import Finding, Row, Severity, error, note
from phi4mm_export.checks.sizes import graph_sizes, layer_count
from phi4mm_export.errors import some
from phi4mm_export.package.graph_io import TensorIo
from phi4mm_export.spec.contract import Component
from phi4mm_export.spec.contract_file import ContractFile, GraphContract, TensorContract

STATE_NAMES = ("conv_state", "recurrent_state")
"""Last parts of the names of the recurrent state that only a gated decoder has."""
_FREE_STATIC = {"height": "crop_size", "width": "crop_size"}
"""Symbolic dims that may also be static at this constant (every crop has the same size)."""
_NEAR = 0.5
"""Least similarity (difflib ratio) at which an extra tensor is taken for a missing one under another name."""
_CODES = {
    "missing": "C101",
    "extra": "C102",
    "name differs": "C103",
    "dtype differs": "C104",
    "rank differs": "C105",
    "dims differ": "C106",
}
_SENTENCES = {
    "missing": "missing",
    "extra": "not in the contract",
    "name differs": "the name differs",
    "dtype differs": "the element type differs",
    "rank differs": "the rank differs",
    "dims differ": "the dims differ",
}


class _Fault(NamedTuple):
    """What faults of one kind share; the layers of one tensor family are reported together."""

    status: str
    severity: Severity
    family: str
    fix: str


@dataclass
class _Side:
    """The inputs or the outputs of one graph while they are being matched."""

    graph: str
    side: str
    tensors: dict[str, TensorIo]
    rows: list[Row] = field(default_factory=list)
    faults: dict[_Fault, list[Row]] = field(default_factory=dict)
    resolved: dict[str, TensorIo] = field(default_factory=dict)

    def add(self, status: str, name: str, expected: str, found: str, severity: Severity, fix: str = "") -> None:
        row = Row(self.graph, self.side, name, status, expected, found)
        self.rows.append(row)
        family = re.sub(r"\.\d+\.", ".N.", name)
        self.faults.setdefault(_Fault(status, severity, family, fix), []).append(row)


def detect_contract(package: OpenedPackage) -> str:
    """The shipped contract a package comes nearest to: gated by its decoder, mobius by its names, else official."""
    decoder = package.graphs.get(Component.DECODER)
    if decoder is not None:
        names = decoder.io.input_names
        if "input_ids" in names or any(name.endswith(STATE_NAMES) for name in names):
            return "gated"
    embedding = package.graphs.get(Component.EMBEDDING)
    if embedding is not None and embedding.io.input("speech_features") is not None:
        return "mobius"
    return "official"


def check_contract(package: OpenedPackage, contract: ContractFile) -> tuple[list[Row], list[Finding]]:
    """One row per tensor of the contract or the graphs, and one finding per kind of fault."""
    rows: list[Row] = []
    findings: list[Finding] = []
    resolved: dict[str, tuple[str, TensorIo]] = {}
    sizes = graph_sizes(package).known(contract.constants, package)
    for component in Component:
        wanted = contract.graphs.get(component.value)
        graph = package.graphs.get(component)
        if wanted is None:
            continue
        if graph is None:
            findings += _absent_graph(package, component, wanted)
            continue
        layers = _layers(package, graph, wanted) if component is Component.DECODER else 0
        for side, tensors, specs in (
            ("input", graph.io.inputs, wanted.inputs),
            ("output", graph.io.outputs, wanted.outputs),
        ):
            matched = _Side(graph.file, side, {tensor.name: tensor for tensor in tensors})
            _match(matched, [(spec, name) for spec in specs for name in spec.names(layers)], package, contract, sizes)
            rows += matched.rows
            findings += _findings(matched)
            resolved |= {f"{component}.{name}": (graph.file, found) for name, found in matched.resolved.items()}
        rows += [Row(graph.file, "input", t.name, "overridable", found=str(t)) for t in graph.io.overridable]
        findings += _other_overridables(graph, wanted)
    findings += _dtype_groups(contract, resolved)
    return rows, findings


def _layers(package: OpenedPackage, graph: OpenedGraph, wanted: GraphContract) -> int:
    """Layers of a decoder: the largest index under the contract's names or those that the config maps to."""
    counts = [0]
    for spec in wanted.inputs:
        if spec.per_layer:
            counts.append(layer_count(spec.name, graph.io.input_names))
            counts.append(layer_count(package.mapped(spec.og_key or "", spec.name), graph.io.input_names))
    configured = package.section("decoder").get("num_hidden_layers")
    if max(counts) == 0 and isinstance(configured, int) and 0 < configured < 1000:
        return configured
    return max(counts)


def _absent_graph(package: OpenedPackage, component: Component, wanted: GraphContract) -> Iterator[Finding]:
    file = package.section(component).get("filename")
    if component is Component.SPEECH and file == "":
        yield note("C100", f"genai_config.json: model.{component}", "the package has no speech graph; audio is refused")
    elif not file:
        yield error(
            "C100",
            f"genai_config.json: model.{component}",
            f"the package has no {component} graph",
            expected=wanted.filename,
            fix="add the graph, or export the package again",
        )


def _other_overridables(graph: OpenedGraph, wanted: GraphContract) -> Iterator[Finding]:
    """Inputs with a default that no adapter file of the contract's form would find."""
    form = wanted.overridable
    others = [t.name for t in graph.io.overridable if form is None or not form.matches(t.name)]
    if others:
        yield note(
            "C107",
            f"{graph.file}: {others[0]}",
            f"{len(others)} inputs with a default are not of the contract ({some(others)}); nothing feeds them",
            expected=form.float_name if form is not None else "no overridable inputs",
        )


def _match(
    side: _Side,
    wanted: Sequence[tuple[TensorContract, str]],
    package: OpenedPackage,
    contract: ContractFile,
    sizes: Mapping[str, int],
) -> None:
    left = dict(side.tensors)
    unmet: list[tuple[TensorContract, str]] = []
    for spec, name in wanted:
        tensor = left.pop(name, None)
        if tensor is None:
            unmet.append((spec, name))
        else:
            _compare(side, spec, name, tensor, contract, sizes)
    for spec, name in unmet:
        mapped = _mapped_name(package, spec, name)
        other = left.get(mapped) or _nearest(spec, name, left.values())
        if other is None:
            if spec.required:
                fix = "rename or add it in the graph" if not left else f"the graph's other tensors: {some(left)}"
                side.add("missing", name, _describe(spec, name), "", Severity.ERROR, fix)
            else:
                side.rows.append(Row(side.graph, side.side, name, "absent", _describe(spec, name)))
            continue
        del left[other.name]
        side.resolved[name] = other
        usable = other.name == mapped and not spec.og_fixed_name
        fix = (
            "the config maps the name, so onnxruntime-genai finds it"
            if usable
            else "rename it in the graph: the runtime binds this name whatever the config says"
            if spec.og_fixed_name
            else f"rename it in the graph, or map it with {spec.og_key}"
            if spec.og_key
            else "rename it in the graph"
        )
        side.add("name differs", name, name, str(other), Severity.WARNING if usable else Severity.ERROR, fix)
    for tensor in left.values():
        if side.side == "input":
            fix = "onnxruntime-genai feeds no such input and the run fails; remove it, or give it an initializer"
            side.add("extra", tensor.name, "", str(tensor), Severity.ERROR, fix)
        else:
            side.add("extra", tensor.name, "", str(tensor), Severity.NOTE, "harmless; nothing reads it")


def _mapped_name(package: OpenedPackage, spec: TensorContract, name: str) -> str:
    """The name that the config gives the tensor; the contract's own without a mapping."""
    if not spec.og_key:
        return name
    template = package.mapped(spec.og_key, spec.name)
    layer = re.search(r"\d+", name) if spec.per_layer else None
    return template.replace("%d", layer[0]) if layer else template


def _nearest(spec: TensorContract, name: str, others: Iterable[TensorIo]) -> TensorIo | None:
    digits = re.findall(r"\d+", name)
    best: tuple[float, str] = (_NEAR, "")
    found: TensorIo | None = None
    for tensor in others:
        if tensor.dtype in spec.dtypes and tensor.rank == spec.rank and re.findall(r"\d+", tensor.name) == digits:
            score = difflib.SequenceMatcher(None, name, tensor.name).ratio()
            if (score, tensor.name) > best:
                best, found = (score, tensor.name), tensor
    return found


def _compare(
    side: _Side, spec: TensorContract, name: str, tensor: TensorIo, contract: ContractFile, sizes: Mapping[str, int]
) -> None:
    side.resolved[name] = tensor
    wanted = _describe(spec, name)
    if tensor.dtype not in spec.dtypes:
        fix = "export the graph with one of the types of the contract"
        side.add("dtype differs", name, " or ".join(spec.dtypes), tensor.dtype, Severity.ERROR, fix)
    elif tensor.rank is not None and tensor.rank not in (spec.rank, spec.alt_rank, len(spec.alt_dims or spec.dims)):
        fix = "the runtime feeds or expects the rank of the contract"
        side.add("rank differs", name, f"rank {spec.rank}", f"rank {tensor.rank}", Severity.ERROR, fix)
    else:
        choices = [dims for dims in (spec.dims, spec.alt_dims) if dims is not None and len(dims) == tensor.rank]
        faults = [_dim_faults(name, dims, tensor, contract, sizes) for dims in choices]
        worst = min(faults, key=len) if faults else []
        if not worst:
            side.rows.append(Row(side.graph, side.side, name, "match", wanted, str(tensor)))
            return
        severity = Severity.ERROR if any(hard for _, hard in worst) else Severity.WARNING
        detail = "; ".join(text for text, _ in worst)
        side.add("dims differ", name, wanted.partition(": ")[2], str(tensor).partition(": ")[2], severity, detail)


def _dim_faults(
    name: str, dims: Sequence[int | str], tensor: TensorIo, contract: ContractFile, sizes: Mapping[str, int]
) -> list[tuple[str, bool]]:
    """Sentences about dims that break the contract, each with whether it is an error."""
    faults = []
    for axis, (raw, found) in enumerate(zip(dims, tensor.dims or (), strict=True)):
        dim = contract.named_dim(raw)
        static = sizes.get(dim) if isinstance(dim, str) else dim
        if static is not None:
            if isinstance(found, int) and found != static:
                faults.append((f"dim {axis} is {found}, expected {static}{_called(dim)}", True))
            elif not isinstance(found, int) and static != 1:
                faults.append((f"dim {axis} is symbolic, expected the static {static}{_called(dim)}", False))
        elif isinstance(found, int) and not _may_be_static(name, axis, str(dim), found, sizes):
            faults.append((f"dim {axis} is fixed at {found}, expected a dynamic {dim}", True))
    return faults


def _may_be_static(name: str, axis: int, dim: str, found: int, sizes: Mapping[str, int]) -> bool:
    last_logits_only = name == "logits" and axis == 1 and found == 1
    return last_logits_only or found == sizes.get(_FREE_STATIC.get(dim, ""))


def _called(dim: int | str) -> str:
    return f" ({dim})" if isinstance(dim, str) else ""


def _describe(spec: TensorContract, name: str) -> str:
    return f"{name}: {'|'.join(spec.dtypes)} [{', '.join(map(str, spec.dims))}]"


def _findings(side: _Side) -> Iterator[Finding]:
    for fault, rows in side.faults.items():
        names = [row.name for row in rows]
        subject = names[0] if len(names) == 1 else f"{some(names)} ({len(names)} tensors)"
        what = f"{side.side} {subject}: {_SENTENCES[fault.status]}"
        where = f"{side.graph}: {names[0]}"
        yield Finding(_CODES[fault.status], fault.severity, where, what, rows[0].expected, rows[0].found, fault.fix)


def _dtype_groups(contract: ContractFile, resolved: Mapping[str, tuple[str, TensorIo]]) -> Iterator[Finding]:
    for group in contract.dtype_groups:
        members = [
            (f"{file}: {tensor.name}", tensor.dtype)
            for key, (file, tensor) in resolved.items()
            if any(fnmatchcase(key, pattern) for pattern in group.members)
        ]
        types = sorted({dtype for _, dtype in members})
        if group.equal and len(types) > 1:
            first = {dtype: next(place for place, found in members if found == dtype) for dtype in types}
            yield error(
                "C110",
                first[types[0]],
                f"the tensors of group {group.group} do not share one element type",
                expected="one type",
                found=", ".join(f"{dtype} in {place}" for dtype, place in first.items()),
                fix="export the graphs with one float type; the runtime passes the tensor on unchanged",
            )
