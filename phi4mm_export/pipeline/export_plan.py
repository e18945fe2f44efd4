"""What an export will do, decided before any byte is written: recipe, graphs, where every weight comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from phi4mm_export.checkpoint.open import Checkpoint
from phi4mm_export.errors import CheckpointError
from phi4mm_export.graphs.bind import Binder, ranks_of
from phi4mm_export.graphs.build import BuiltGraph, build
from phi4mm_export.package.write import Placed, place
from phi4mm_export.spec.contract import FILE_NAMES, Component, data_file_name
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.names import EMBEDDING_TABLE, OUTPUT_HEAD
from phi4mm_export.spec.recipe import Blockwise, LoraForm, Recipe
from phi4mm_export.weights.streams import Stream

TABLE_MODULE, HEAD_MODULE = EMBEDDING_TABLE.removesuffix(".weight"), OUTPUT_HEAD.removesuffix(".weight")


@dataclass(frozen=True)
class PlannedGraph:
    """One graph, its streams, and which of its tensors lie in the decoder's data file instead (name there)."""

    built: BuiltGraph
    file_name: str
    streams: tuple[Stream, ...]
    borrowed: Mapping[str, str]

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data file."""
        return place(self.streams, "")[1]

    @property
    def placed(self) -> Mapping[str, Placed]:
        """Where the streams' tensors will lie in the data file."""
        return place(self.streams, PurePosixPath(data_file_name(self.file_name)).name)[0]


@dataclass(frozen=True)
class ExportPlan:
    """Everything an export needs to know; `baked` are the adapters that end up inside the decoder."""

    recipe: Recipe
    graphs: tuple[PlannedGraph, ...]
    baked: tuple[Role, ...]
    adapter_files: tuple[Role, ...]
    """The adapters that become files beside the decoder (the adapters form)."""
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(graph.data_nbytes for graph in self.graphs)

    @property
    def file_names(self) -> frozenset[str]:
        """Every graph and data file that will be written."""
        graphs = {graph.file_name for graph in self.graphs}
        return frozenset(graphs | set(files_of(self)))

    @property
    def nbytes_read(self) -> int:
        """Bytes of the checkpoint that will be read."""
        return sum(stream.nbytes_read for graph in self.graphs for stream in graph.streams)


def plan_export(checkpoint: Checkpoint, recipe: Recipe, *, adapter_named: bool) -> ExportPlan:
    """Build every graph of the recipe and bind its weights.

    adapter_named: whether the user asked for `recipe.adapter` by name; then its absence is an error.
    Raises CheckpointError for an adapter that was asked for and is not there.
    """
    baked, warnings = choose_adapters(checkpoint, recipe, adapter_named=adapter_named)
    merged = baked[0] if recipe.lora is LoraForm.MERGED and baked else None
    ranks = ranks_of(checkpoint, baked)
    recipe = share_table(checkpoint, recipe)
    graphs = []
    for component in Component:
        if component not in recipe.components:
            continue
        built = build(component, checkpoint.config, ranks, recipe)
        streams = tuple(Binder(checkpoint, merged).streams(built.model))
        borrowed: dict[str, str] = {}
        if component is Component.EMBEDDING and recipe.table_is_shared:
            borrowed = {s.name: s.name.replace(TABLE_MODULE, HEAD_MODULE) for t in streams for s in t.outputs}
            streams = ()
        graphs.append(PlannedGraph(built, FILE_NAMES[recipe.layout][component], streams, borrowed))
    apart = recipe.lora is LoraForm.ADAPTERS
    beside = tuple(role for role in Role if role in checkpoint.adapters) if apart else ()
    return ExportPlan(recipe, tuple(graphs), baked, beside, warnings)


def choose_adapters(
    checkpoint: Checkpoint, recipe: Recipe, *, adapter_named: bool
) -> tuple[tuple[Role, ...], tuple[str, ...]]:
    """The adapters that the LoRA form takes into the decoder, and what the user should know about them."""
    present = tuple(role for role in Role if role in checkpoint.adapters)
    if Component.DECODER not in recipe.components:
        return (), ()
    if recipe.lora in (LoraForm.MERGED, LoraForm.BRANCH):
        return _one_adapter(checkpoint, recipe, present, adapter_named=adapter_named)
    if adapter_named and recipe.adapter and recipe.adapter not in present:
        raise _absent(checkpoint, recipe.adapter)
    if not present:
        return (), ("the checkpoint holds no adapter, so none was baked: every mode runs the same weights",)
    lacking = [role for role in Role if role not in present]
    warnings = tuple(
        f"the checkpoint holds no {role} adapter: {role} prompts run as the base model" for role in lacking
    )
    return (present if recipe.lora is LoraForm.GATED else ()), warnings


def _one_adapter(
    checkpoint: Checkpoint, recipe: Recipe, present: tuple[Role, ...], *, adapter_named: bool
) -> tuple[tuple[Role, ...], tuple[str, ...]]:
    wanted = recipe.adapter
    if wanted is None:
        return (), ()
    if wanted in present:
        others = [role for role in Role if role is not wanted]
        return (wanted,), tuple(
            f"{other} and text prompts run with the {wanted} adapter's weights (--lora {recipe.lora})"
            for other in others
        )
    if adapter_named or present:
        raise _absent(checkpoint, wanted)
    return (), ("the checkpoint holds no adapter, so none was baked: every mode runs the same weights",)


def _absent(checkpoint: Checkpoint, role: Role) -> CheckpointError:
    first = f"model.layers.0.self_attn.qkv_proj.lora_A.{role}.weight"
    found = ", ".join(sorted(checkpoint.adapters)) or "none"
    return CheckpointError(
        f"expected a {role} adapter to bake, found adapters: {found}; the first tensor missing is {first}",
        where=str(checkpoint.path.name),
        fix=f"leave --adapter {role} out, or name its PEFT folder with --adapter-path {role}=DIR",
    )


def share_table(checkpoint: Checkpoint, recipe: Recipe) -> Recipe:
    """Whether embedding table and head become one stretch of bytes: one matrix, stored the same way, one folder."""
    fmt, width = recipe.embedding_format, checkpoint.config.hidden_size
    fits = not isinstance(fmt, Blockwise) or width % fmt.block_for(width) == 0
    same = recipe.shares_table and checkpoint.config.tied_head and fits
    return replace(recipe, table_is_shared=same)


def files_of(plan: ExportPlan) -> dict[str, int]:
    """Name and size of every data file; graph files are small and follow from the graphs."""
    return {data_file_name(graph.file_name): graph.data_nbytes for graph in plan.graphs if graph.streams}
