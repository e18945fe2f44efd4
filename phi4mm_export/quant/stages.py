"""The order in which a graph is computed while it is being quantized.

The graph is cut at the inputs of its products. Each piece runs once per sample and stream: the float stream with the
original weights, the quantized stream with what has been decided so far. Between pieces only live values are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from phi4mm_export.quant.graph import Graph, names_read
from phi4mm_export.quant.pieces import CAPTURED, Piece, capturing
from phi4mm_export.quant.sites import Site
from phi4mm_export.quant.spill import Spill

if TYPE_CHECKING:
    import onnx

FLOAT, QUANTIZED = "float", "quantized"
PHASES = 3
"""Of a stage: nodes that no quantized weight touches run once; the others run in both streams; the input is read."""


@dataclass(frozen=True)
class Stage:
    """Sites that share an input, and the nodes to run before it is there. An empty stage ends the graph."""

    sites: tuple[Site, ...]
    nodes: tuple[int, ...]
    captures: str
    """The value to read; of a main node's body when the sites stand in one."""


def plan_stages(graph: Graph, sites: Sequence[Site]) -> tuple[Stage, ...]:
    """One stage per distinct input of the sites, in topological order."""
    producer = {name: index for index, node in enumerate(graph.nodes) for name in node.output if name}
    done: set[int] = set()
    stages: list[Stage] = []
    ordered = sorted(sites, key=lambda site: (site.main, site.branch, site.position))
    first = {site.capture: rank for rank, site in reversed(list(enumerate(ordered)))}
    for _, group in groupby(sorted(ordered, key=lambda s: first[s.capture]), key=lambda s: s.capture):
        members = tuple(group)
        head = members[0]
        wanted = names_read(graph.nodes[head.main]) if head.branch else {head.input}
        nodes = _ancestors(graph, producer, wanted, done)
        done.update(nodes)
        stages.append(Stage(members, nodes, head.input))
    return tuple(stages)


def _ancestors(graph: Graph, producer: Mapping[str, int], wanted: set[str], done: set[int]) -> tuple[int, ...]:
    found: set[int] = set()
    waiting = [producer[name] for name in wanted if name in producer]
    nodes = graph.nodes
    while waiting:
        index = waiting.pop()
        if index in found or index in done:
            continue
        found.add(index)
        waiting += [producer[name] for name in names_read(nodes[index]) if name in producer]
    return tuple(sorted(found))


class Streams:
    """Runs the pieces of a plan over all samples and keeps what later pieces need.

    weights: how to read the constants of the quantized stream that differ from the graph's; filled by the caller
    between stages. paired: how many of the samples have a float stream, the first ones; the others have the quantized
    one only. keep_inputs: the samples are needed again afterwards. biases: constants that will change.
    """

    def __init__(
        self,
        graph: Graph,
        stages: Sequence[Stage],
        spill: Spill,
        samples: Sequence[int],
        *,
        jobs: int,
        twofold: bool,
        paired: int | None = None,
        keep_inputs: bool = False,
        biases: frozenset[str] = frozenset(),
    ) -> None:
        self.graph, self.spill, self.samples, self.jobs, self.twofold = graph, spill, samples, jobs, twofold
        self._paired = len(samples) if paired is None else paired
        self.weights: dict[str, Callable[[], NDArray[Any]]] = {}
        self._stages = stages
        self._variable = biases.union(site.weight for stage in stages for site in stage.sites)
        self._tainted = _tainted(graph, stages)
        self._last_use = _last_use(graph, stages, self._tainted)
        self._live: set[str] = set() if keep_inputs else set(graph.inputs)

    def advance(self, number: int) -> None:
        """Compute the values that stage `number` captures, drop what nothing needs any more."""
        nodes = self.graph.nodes
        for phase, tainted in enumerate((False, True)):
            chosen = [i for i in self._stages[number].nodes if _is_tainted(nodes[i], self._tainted) is tainted]
            now = number * PHASES + phase
            made = {name for i in chosen for name in nodes[i].output if name}
            keep = sorted(name for name in made if self._last_use.get(name, -1) > now)
            if keep:
                piece = Piece(self.graph, [nodes[i] for i in chosen], keep, self._variable)
                if tainted and self.twofold:
                    self._run(piece, FLOAT, self.samples[: self._paired])
                    self._run(piece, QUANTIZED, self.samples)
                else:
                    self._run(piece, FLOAT, self.samples)
                self._live.update(keep)
            self._sweep(now)

    def captured(self, number: int) -> Iterator[tuple[NDArray[Any] | None, NDArray[Any]]]:
        """Per sample, in order: the stage's input in the float stream (None where there is none) and the quantized."""
        stage = self._stages[number]
        read = self._reader(stage)
        differ = self.twofold and (bool(stage.sites[0].branch) or stage.captures in self._tainted)
        for rank, index in enumerate(self.samples):
            x = read(QUANTIZED if differ else FLOAT, index)
            if rank >= self._paired:
                yield None, x
            else:
                yield read(FLOAT, index) if differ else x, x

    def _reader(self, stage: Stage) -> Callable[[str, int], NDArray[Any]]:
        """Reads the stage's input of a stream and a sample; inside a body, by running what comes before it."""
        head = stage.sites[0]
        if not head.branch:
            return lambda stream, index: self._value(stream, index, stage.captures)
        node = self.graph.nodes[head.main]
        reading = capturing(node, head.branch, stage.captures, _element(head))
        piece = Piece(self.graph, [reading], [CAPTURED], self._variable)
        streams = (FLOAT, QUANTIZED) if self.twofold else (FLOAT,)
        fixed = {stream: self._weights(piece, stream) for stream in streams}
        return lambda stream, index: piece.run(self._feeds(piece, stream, index) | fixed[stream])[0]

    def retire(self, number: int) -> None:
        """Drop what only this stage needed, once its sites are decided."""
        self._sweep(number * PHASES + PHASES - 1)

    def _run(self, piece: Piece, stream: str, samples: Sequence[int]) -> None:
        fixed = self._weights(piece, stream)

        def one(index: int) -> None:
            values = piece.run(self._feeds(piece, stream, index) | fixed)
            for name, value in zip(piece.outputs, values, strict=True):
                self.spill.put((stream, index, name), value)

        each(one, samples, self.jobs)

    def _weights(self, piece: Piece, stream: str) -> dict[str, NDArray[Any]]:
        changed = self.weights if stream == QUANTIZED else {}
        return {name: changed[name]() if name in changed else self.graph.constant(name) for name in piece.weights}

    def _feeds(self, piece: Piece, stream: str, index: int) -> dict[str, NDArray[Any]]:
        return {name: self._value(stream, index, name) for name in piece.inputs}

    def _value(self, stream: str, index: int, name: str) -> NDArray[Any]:
        return self.spill.get((stream if name in self._tainted and self.twofold else FLOAT, index, name))

    def _sweep(self, now: int) -> None:
        for name in sorted(self._live):
            if self._last_use.get(name, -1) <= now:
                self._live.remove(name)
                for index in self.samples:
                    for stream in (FLOAT, QUANTIZED):
                        self.spill.drop((stream, index, name))


def each(work: Callable[[int], None], items: Sequence[int], jobs: int) -> None:
    """Call `work` for every item, on `jobs` threads."""
    if jobs <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(work, items):
            pass


def _tainted(graph: Graph, stages: Sequence[Stage]) -> set[str]:
    """Values that depend on a quantized product."""
    mains = {site.main for stage in stages for site in stage.sites}
    tainted: set[str] = set()
    for index, node in enumerate(graph.nodes):
        if index in mains or not tainted.isdisjoint(names_read(node)):
            tainted.update(name for name in node.output if name)
    return tainted


def _is_tainted(node: onnx.NodeProto, tainted: set[str]) -> bool:
    return not tainted.isdisjoint(node.output)


def _last_use(graph: Graph, stages: Sequence[Stage], tainted: set[str]) -> dict[str, int]:
    """Value -> the last moment at which it is read, as stage * PHASES + phase; nodes of no stage do not count."""
    last: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for index in stage.nodes:
            node = graph.nodes[index]
            for name in names_read(node):
                last[name] = max(last.get(name, -1), number * PHASES + int(_is_tainted(node, tainted)))
        head = stage.sites[0]
        for name in names_read(graph.nodes[head.main]) if head.branch else {stage.captures}:
            last[name] = number * PHASES + PHASES - 1
    return last


def _element(site: Site) -> int:
    import onnx

    return int(onnx.TensorProto.FLOAT16 if site.float_type == "float16" else onnx.TensorProto.FLOAT)
