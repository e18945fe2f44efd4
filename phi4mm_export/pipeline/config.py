"""`phi4mm config`: write the three configuration files for graphs that already stand in a folder, anybody's.

Only names are judged here: what the runtime's keys can be made to point at, and what nothing can bridge. Element
types, ranks and kernels are `validate`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phi4mm_export.checkpoint.hub import fetch_checkpoint, resolve_model
from phi4mm_export.errors import PackageError, UsageError, some
from phi4mm_export.graphs.onnx_file import load_graph
from phi4mm_export.package.cache_names import grows_by_concat
from phi4mm_export.package.configs import ConfigOptions, runtime_configs
from phi4mm_export.package.graph_io import GraphIo, model_io
from phi4mm_export.package.map_graphs import GraphMap, component_of, map_graph, stand_ins
from phi4mm_export.package.replace import replace_files, with_manifest
from phi4mm_export.package.tokenizer import OPTIONAL_FILES, REQUIRED_FILES, read_added_tokens
from phi4mm_export.spec.config_json import parse_config
from phi4mm_export.spec.contract import FILE_NAMES, Component, FloatType, PackageLayout, Provider
from phi4mm_export.spec.genai import CONFIG_FILE
from phi4mm_export.spec.json_text import parse_object, read_object
from phi4mm_export.spec.model import ModelConfig, Role
from phi4mm_export.spec.on_disk import exists, found_at, is_file, is_folder
from phi4mm_export.spec.phi4mm_config import ADAPTER_FILES, check_device
from phi4mm_export.spec.processors import PREPROCESSOR_FILE
from phi4mm_export.spec.tokens import check_placeholders

if TYPE_CHECKING:
    import onnx

MOST_FOLDERS_DOWN = 2
"""Graphs are looked for in the folder, its folders and theirs."""
PUBLISHED_TOWER = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
"""SigLIP's size, which config.json of the original layout does not state and no configuration file needs."""


@dataclass(frozen=True)
class ConfigResult:
    """What `config` wrote, or with `dry_run` would write. `files`: name -> document, in the order of writing.

    `renamed`: config key -> tensor, where it is not the official one; `warnings`: what cannot be mapped and what that
    costs; `kv_cache_nbytes` is reserved by the runtime for `max_length` tokens of one sequence.
    """

    package: Path
    graphs: Mapping[Component, str]
    files: Mapping[str, Any]
    renamed: Mapping[str, str]
    warnings: tuple[str, ...]
    max_length: int
    kv_bytes_per_token: int
    kv_cache_nbytes: int
    written: bool


@dataclass(frozen=True)
class _Graph:
    """One .onnx file of the folder; `file` is its path in the package, with `/`."""

    file: str
    model: onnx.ModelProto
    io: GraphIo


def config(
    model: str | Path,
    package: Path,
    *,
    revision: str | None = None,
    provider: Provider = Provider.CPU,
    device_id: int = 0,
    max_length: int | None = None,
    memory_budget: int | None = None,
    release_arena: bool = False,
    original_audio_limit: bool = False,
    dry_run: bool = False,
) -> ConfigResult:
    """Write genai_config.json, vision_processor.json and speech_processor.json into `package`.

    `model` is a checkpoint's folder, or a hub id (with `revision`); only its small JSON files are read, and fetched.
    Raises UsageError for folders and options that cannot be used, CheckpointError for the checkpoint's files,
    PackageError for graphs that are missing, ambiguous, of another model, or that the runtime cannot run under any
    config, SystemLimitError for the budget.
    """
    check_device(device_id)
    if not is_folder(package):
        found = found_at(package)
        raise UsageError(f"expected a package folder, found {found}", where=str(package), fix="pass the folder's path")
    checkpoint = _small_files(model, revision)
    dims = read_model_config(checkpoint)
    special = read_added_tokens(checkpoint)
    check_placeholders(special, where=REQUIRED_FILES[0])
    graphs, remarks = _choose_graphs(package)
    maps = stand_ins({part: map_graph(part, graph.file, graph.io) for part, graph in graphs.items()})
    _refuse_fatal_gaps(maps)
    decoder = graphs[Component.DECODER]
    _check_dims(dims, graphs, maps)
    adapters = tuple(role for role in Role if decoder.io.overridable and is_file(package / ADAPTER_FILES[role]))
    share_cache = _shares_cache(decoder, maps[Component.DECODER])
    options = ConfigOptions(
        provider=provider,
        float_type=_cache_type(decoder.io, maps[Component.DECODER]),
        max_length=max_length,
        memory_budget=memory_budget,
        adapters=adapters,
        release_arena=release_arena,
        original_audio_limit=original_audio_limit,
    )
    names = {part: mapped.names for part, mapped in maps.items()}
    configs = runtime_configs(checkpoint, dims, options, special=special, graphs=names, share_cache=share_cache)
    chosen = {
        "max_length": max_length,
        "memory_budget": memory_budget,
        "release_arena": release_arena,
        "original_audio_limit": original_audio_limit,
    }
    files = with_manifest(package, configs.files, chosen, provider.value)
    if not dry_run:
        replace_files(package, files)
    remarks += [str(gap) for mapped in maps.values() for gap in mapped.gaps]
    remarks += _other_remarks(share_cache=share_cache, adapters=adapters, graphs=graphs)
    remarks += _float32_on_cuda(decoder, options)
    remarks += _missing_tokenizer(package, checkpoint)
    return ConfigResult(
        package=package,
        graphs={part: graph.file for part, graph in graphs.items()},
        files={name: parse_object(data, name) for name, data in configs.files.items()},
        renamed={key: name for mapped in maps.values() for key, name in mapped.renamed.items()},
        warnings=(*configs.warnings, *remarks),
        max_length=configs.max_length,
        kv_bytes_per_token=configs.kv_bytes_per_token,
        kv_cache_nbytes=configs.kv_cache_nbytes,
        written=not dry_run,
    )


def _small_files(model: str | Path, revision: str | None) -> Path:
    """The folder of a checkpoint's small files. Raises as `resolve_model` and `fetch_checkpoint`."""
    found = resolve_model(str(model), revision=revision)
    if isinstance(found, Path):
        return found
    from phi4mm_export.checkpoint.remote import SMALL_FILES

    return fetch_checkpoint(found, revision=revision, patterns=SMALL_FILES)


def read_model_config(checkpoint: Path) -> ModelConfig:
    """The dimensions that a checkpoint's config.json states; weights are neither needed nor read.

    Raises CheckpointError.
    """
    raw = read_object(checkpoint / "config.json")
    tower = raw.get("vision_config")
    raw["vision_config"] = {**PUBLISHED_TOWER, **(tower if isinstance(tower, dict) else {})}
    preprocessor = checkpoint / PREPROCESSOR_FILE
    found = read_object(preprocessor) if exists(preprocessor) else None
    return parse_config(raw, {}, preprocessor=found, generation=None)


def _choose_graphs(package: Path) -> tuple[dict[Component, _Graph], list[str]]:
    """Component -> graph, and remarks about files that were left aside. Raises PackageError."""
    candidates: dict[Component, list[_Graph]] = {part: [] for part in Component}
    broken: list[PackageError] = []
    remarks: list[str] = []
    for path in _onnx_files(package):
        file = path.relative_to(package).as_posix()
        try:
            model = load_graph(path, where=file)
        except PackageError as err:
            broken.append(err)
            continue
        graph = _Graph(file, model, model_io(model))
        part = component_of(graph.io)
        if part is None:
            remarks.append(f"{file}: not recognised as one of the four graphs, left aside")
        else:
            candidates[part].append(graph)
    preferred = _preferred_files(package)
    chosen: dict[Component, _Graph] = {}
    for part, graphs in candidates.items():
        if len(graphs) > 1:
            graphs = [graph for graph in graphs if graph.file == _first_of(preferred[part], graphs)] or graphs
        if len(graphs) > 1:
            raise PackageError(
                f"{len(graphs)} graphs could be the {part}: {some(graph.file for graph in graphs)}; expected one",
                where=str(package),
                fix=f"move the others away, or name the right one {FILE_NAMES[PackageLayout.FLAT][part]}",
            )
        if graphs:
            chosen[part] = graphs[0]
    missing = [part for part in Component if part not in chosen]
    if broken and missing:
        raise broken[0]
    needed = [part for part in missing if part is not Component.SPEECH]
    if needed:
        raise PackageError(
            f"found no {some(needed)} graph, expected an .onnx file for each of decoder, vision and embedding",
            where=str(package),
            fix="put the graph into the folder; the runtime does not load a phi4mm package without it",
        )
    remarks += [f"{err}; left aside" for err in broken]
    if missing:
        remarks.append("the package has no speech graph: audio requests are refused by the runtime")
    return {part: chosen[part] for part in Component if part in chosen}, remarks


def _onnx_files(package: Path) -> list[Path]:
    """Every .onnx file at most MOST_FOLDERS_DOWN folders deep, hidden ones aside, in order of their names."""
    found = []
    for depth in range(MOST_FOLDERS_DOWN + 1):
        for path in package.glob("/".join(["*"] * depth + ["*.onnx"])):
            if not any(part.startswith(".") for part in path.relative_to(package).parts):
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(package).as_posix())


def _preferred_files(package: Path) -> dict[Component, list[str]]:
    """Files that decide between several candidates: the present config's, then those of our layouts."""
    try:
        present = read_object(package / CONFIG_FILE, error=PackageError).get("model")
    except PackageError:
        present = None  # it is going to be written anew; a broken one decides nothing
    preferred: dict[Component, list[str]] = {}
    for part in Component:
        section = present.get(part.value) if isinstance(present, dict) else None
        named = section.get("filename") if isinstance(section, dict) else None
        preferred[part] = [named] if isinstance(named, str) else []
        preferred[part] += [FILE_NAMES[layout][part] for layout in PackageLayout]
    return preferred


def _first_of(preferred: list[str], graphs: list[_Graph]) -> str | None:
    files = {graph.file for graph in graphs}
    return next((file for file in preferred if file in files), None)


def _refuse_fatal_gaps(maps: Mapping[Component, GraphMap]) -> None:
    gaps = [gap for mapped in maps.values() for gap in mapped.gaps if gap.fatal]
    if gaps:
        several = f"{len(gaps)} tensors cannot be mapped: {some(map(str, gaps))}"
        raise PackageError(
            gaps[0].what if len(gaps) == 1 else several,
            where=gaps[0].where,
            fix="rename the tensor in the graph, or export the graph again; no config lets the runtime run it as it is",
        )


def _check_dims(dims: ModelConfig, graphs: Mapping[Component, _Graph], maps: Mapping[Component, GraphMap]) -> None:
    """Refuse graphs whose static dims are those of another model than the checkpoint. Raises PackageError."""
    faults = list(_dim_faults(dims, graphs, maps))
    if faults:
        raise PackageError(
            f"{len(faults)} dims differ from the checkpoint's config.json: {some(faults)}",
            where=faults[0].split(":")[0],
            fix="pass the checkpoint that the graphs were made from",
        )


def _dim_faults(
    dims: ModelConfig, graphs: Mapping[Component, _Graph], maps: Mapping[Component, GraphMap]
) -> Iterator[str]:
    cache = maps[Component.DECODER].cache
    if cache is not None and cache.layers != dims.num_layers:
        file = graphs[Component.DECODER].file
        yield f"{file}: {cache.layers} cache layers, expected {dims.num_layers} (num_hidden_layers)"
    decoder_in, decoder_out = maps[Component.DECODER].names.inputs, maps[Component.DECODER].names.outputs
    past = decoder_in.get("past_key_names", "%d") % 0
    embeds = maps[Component.EMBEDDING].names.outputs.get("inputs_embeds", "")
    wanted = (
        (Component.DECODER, decoder_in.get("inputs_embeds", ""), 3, 2, dims.hidden_size, "hidden_size"),
        (Component.DECODER, decoder_out.get("logits", ""), 3, 2, dims.vocab_size, "vocab_size"),
        (Component.DECODER, past, 4, 1, dims.num_kv_heads, "num_key_value_heads"),
        (Component.DECODER, past, 4, 3, dims.head_dim, "head size"),
        (Component.EMBEDDING, embeds, 3, 2, dims.hidden_size, "hidden_size"),
    )
    for part, name, rank, axis, size, meaning in wanted:
        io = graphs[part].io
        tensor = io.input(name) or io.output(name)
        if tensor is not None and tensor.rank == rank and tensor.dim(axis) not in (size, None):
            found = tensor.dim(axis)
            if isinstance(found, int):
                yield f"{graphs[part].file}: {name} has {found} at axis {axis}, expected {size} ({meaning})"


def _shares_cache(decoder: _Graph, mapped: GraphMap) -> bool:
    """Whether past and present can be one buffer: not with a cache that is concatenated."""
    cache = mapped.cache
    return cache is None or not grows_by_concat(decoder.model.graph, cache.present_key % 0)


def _cache_type(io: GraphIo, mapped: GraphMap) -> FloatType:
    """The float type whose item size is that of the cache; 16 bits for bfloat16 too."""
    past = io.input(mapped.cache.past_key % 0) if mapped.cache else None
    return FloatType.FLOAT32 if past is None or past.dtype == "float" else FloatType.FLOAT16


def _other_remarks(
    *, share_cache: bool, adapters: tuple[Role, ...], graphs: Mapping[Component, _Graph]
) -> Iterator[str]:
    if not share_cache:
        yield "the decoder's cache grows by Concat: past_present_share_buffer is false, and `rewind_to` will not work"
    if adapters:
        yield "adapter_filename is written, but ONNX Runtime GenAI 0.9 to 0.18 ignores it for phi4mm"
    elif graphs[Component.DECODER].io.overridable:
        count = len(graphs[Component.DECODER].io.overridable)
        yield f"{count:,} decoder inputs have default values, which the runtime always uses"


def _float32_on_cuda(decoder: _Graph, options: ConfigOptions) -> Iterator[str]:
    """GroupQueryAttention, which every decoder here holds its cache with, has no float32 kernel on CUDA."""
    fused = any(node.op_type == "GroupQueryAttention" for node in decoder.model.graph.node)
    if fused and options.provider is Provider.CUDA and options.float_type is FloatType.FLOAT32:
        yield (
            f"{decoder.file}: the decoder computes in float32, for which CUDA has no GroupQueryAttention: the runtime "
            "will not load it; export with --ep cuda, or write the config with --ep cpu"
        )


def _missing_tokenizer(package: Path, checkpoint: Path) -> Iterator[str]:
    """Tokenizer files that the checkpoint has, or must have, and the package has not."""
    absent = [name for name in REQUIRED_FILES if not is_file(package / name)]
    if absent:
        yield f"the package lacks {some(absent)}: copy them from the checkpoint, or the runtime does not start"
    others = [name for name in OPTIONAL_FILES if is_file(checkpoint / name) and not is_file(package / name)]
    if others:
        yield f"the package lacks {some(others)}, which the checkpoint has: copy them, or prompts may be read otherwise"
