"""Every tensor of a synthetic checkpoint: stored name, shape, distribution; and which file holds it.

Names and shapes come from `spec.inventory`; this module adds how the numbers of each tensor spread.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phi4mm_export.checkpoint.source import DType
from phi4mm_export.checkpoint.synth_settings import SynthSettings, WeightStyle, model_config
from phi4mm_export.checkpoint.synth_values import Numbers
from phi4mm_export.spec.inventory import stored_inventory
from phi4mm_export.spec.model import Layout, Role
from phi4mm_export.spec.names import canonical_name, native_name, split_lora

MAIN_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
LORA_B_GAIN = 0.6
"""Size of an adapter's contribution relative to that of its base projection, its scale included."""
LOGIT_SIZE = 4.8
"""Root mean square of the logits: the largest of 200,064 then leads by about 1."""
STORED_TYPES = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}


@dataclass(frozen=True)
class Spread:
    """How the tensors whose original name matches `pattern` spread.

    `gain` is the size of the layer's output for an input of size 1: the deviation is gain / sqrt(inputs). `std` is the
    deviation itself. `kind` decides what heavy tails do: "linear" and "norm" get channels that stand out, "linear" and
    "table" Student tails; "plain" stays as it is.
    """

    pattern: str
    kind: str = "plain"
    gain: float | None = None
    std: float = 0.0
    mean: float = 0.0

    def numbers(self, shape: tuple[int, ...]) -> Numbers:
        if self.gain is None:
            return Numbers(self.std, self.mean)
        return Numbers(self.gain / math.sqrt(math.prod(shape[1:])), self.mean)


SPREADS: tuple[Spread, ...] = (
    # norms, tables, constants
    Spread("*norm*.weight", "norm", std=0.2, mean=1.0),
    Spread("*norm*.bias", std=0.2),
    Spread("model.embed_tokens.weight", "table", gain=LOGIT_SIZE),
    Spread("lm_head.weight", "table", gain=LOGIT_SIZE),
    Spread("*.position_embedding.weight", "table", std=0.6),
    Spread("*.bias_values.weight", std=1.0),
    Spread("*.head.probe", std=1.0),
    Spread("*_GN", std=1.5),
    Spread("*.global_mean", std=0.8, mean=12.0),
    Spread("*.global_invstd", std=0.04, mean=0.3),
    Spread("*.glu.b[12]", std=0.2),
    # decoder
    Spread("*.qkv_proj.base_layer.weight", "linear", gain=1.4),
    Spread("*.o_proj.base_layer.weight", "linear", gain=1.4),
    Spread("*.gate_up_proj.base_layer.weight", "linear", gain=1.2),
    Spread("*.down_proj.base_layer.weight", "linear", gain=1.6),
    Spread("*.lora_A.*.weight", "table", gain=1.0),
    # projections into the decoder
    Spread("*_projection*.0.weight", "linear", gain=1.2),
    Spread("*_projection*.0.bias", std=0.2),
    Spread("*_projection*.2.weight", "linear", gain=0.6),
    # biases of all other layers
    Spread("*bias", std=0.1),
    # SigLIP tower
    Spread("*.patch_embedding.weight", "table", gain=1.5),
    Spread("*.layers.*.[qk]_proj.weight", "linear", gain=1.6),
    Spread("*.layers.*.v_proj.weight", "linear", gain=1.4),
    Spread("*.layers.*.out_proj.weight", "linear", gain=1.0),
    Spread("*.layers.*.fc[12].weight", "linear", gain=1.2),
    Spread("*.head.*weight", "linear", gain=1.0),
    # conformer
    Spread("*.embed.conv.[025].weight", gain=1.5),
    Spread("*.embed.conv.[36].weight", "table", gain=1.4),
    Spread("*.embed.out.weight", "linear", gain=1.5),
    Spread("*.dw_conv.weight", gain=1.2),
    Spread("*.pw_conv*.weight", "table", gain=1.4),
    Spread("*.ext_pw_conv_1d.weight", "table", gain=1.4),
    Spread("*.encoders.*.weight", "linear", gain=1.4),
)
"""The first row that matches counts. LoRA's B follows from its base projection: see `_lora_b`."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor: its stored name in the original layout (which also seeds its numbers), shape and distribution."""

    name: str
    shape: tuple[int, ...]
    numbers: Numbers

    @property
    def adapter(self) -> Role | None:
        """The adapter that the tensor belongs to."""
        lora = split_lora(self.name)
        return Role(lora.adapter) if lora and lora.adapter else None


@dataclass(frozen=True)
class StoredTensor:
    """A planned tensor as a file spells it."""

    name: str
    dtype: DType
    plan: PlannedTensor

    @property
    def nbytes(self) -> int:
        return math.prod(self.plan.shape) * self.dtype.nbytes


@dataclass(frozen=True)
class PlannedFile:
    """One safetensors file, its path inside the checkpoint with forward slashes."""

    path: str
    tensors: tuple[StoredTensor, ...]


def planned_tensors(settings: SynthSettings, weights: WeightStyle = WeightStyle.PLAIN) -> tuple[PlannedTensor, ...]:
    """All tensors of the model in the original's order, adapters included."""
    shapes = stored_inventory(model_config(settings))
    return tuple(PlannedTensor(name, shape, _numbers(name, shape, settings, weights)) for name, shape in shapes.items())


def planned_files(settings: SynthSettings, layout: Layout, rows: tuple[PlannedTensor, ...]) -> tuple[PlannedFile, ...]:
    """The safetensors files of a layout: the shards, then the adapter files of the native layout.

    Shards hold equal numbers of consecutive tensors, so layers and towers straddle them.
    """
    stored = tuple(_stored(row, settings, layout) for row in rows)
    if layout is Layout.ORIGINAL:
        return tuple(_shards(stored, settings.shards))
    main = tuple(tensor for tensor in stored if tensor.plan.adapter is None)
    adapters = (
        PlannedFile(adapter_path(role), tuple(tensor for tensor in stored if tensor.plan.adapter is role))
        for role in Role
    )
    return (*_shards(main, settings.shards), *adapters)


def adapter_path(role: Role) -> str:
    """Where the native layout keeps an adapter's tensors."""
    return f"{role}-lora/{ADAPTER_FILE}"


def inventory(settings: SynthSettings, layout: Layout) -> tuple[str, ...]:
    """One tab-separated row per tensor below a title row: name, safetensors type, shape, and in the native layout the
    file, where shards count as one. Only for settings whose tensors are all bfloat16.
    """
    lines = ["name\tdtype\tshape" + ("\tfile" if layout is Layout.NATIVE else "")]
    for row in planned_tensors(settings):
        line = f"{_stored(row, settings, layout).name}\tBF16\t{json.dumps(list(row.shape))}"
        file = MAIN_FILE if row.adapter is None else adapter_path(row.adapter)
        lines.append(line + (f"\t{file}" if layout is Layout.NATIVE else ""))
    return tuple(lines)


def _shards(tensors: tuple[StoredTensor, ...], count: int) -> Iterator[PlannedFile]:
    if count == 1:
        yield PlannedFile(MAIN_FILE, tensors)
        return
    cuts = [round(i * len(tensors) / count) for i in range(count + 1)]
    for number in range(count):
        part = tensors[cuts[number] : cuts[number + 1]]
        yield PlannedFile(f"model-{number + 1:05d}-of-{count:05d}.safetensors", part)


def _stored(row: PlannedTensor, settings: SynthSettings, layout: Layout) -> StoredTensor:
    kept_wide = settings.fp32_pattern and settings.fp32_pattern in row.name
    dtype = DType.F32 if kept_wide else STORED_TYPES[settings.dtype]
    if layout is Layout.ORIGINAL:
        return StoredTensor(row.name, dtype, row)
    prefix = settings.adapter_prefix if row.adapter is not None else ""
    return StoredTensor(prefix + native_name(canonical_name(row.name)), dtype, row)


def _numbers(name: str, shape: tuple[int, ...], settings: SynthSettings, weights: WeightStyle) -> Numbers:
    spread = _lora_b(name, settings) if ".lora_B." in name else _spread(name)
    numbers = spread.numbers(shape)
    if weights is WeightStyle.PLAIN:
        return numbers
    return replace(numbers, student=spread.kind in ("linear", "table"), outliers=spread.kind in ("linear", "norm"))


def _spread(name: str) -> Spread:
    return next(row for row in SPREADS if fnmatch.fnmatchcase(name, row.pattern))


def _lora_b(name: str, settings: SynthSettings) -> Spread:
    """B's gain makes the adapter `LORA_B_GAIN` times as loud as its base projection, whatever its scale alpha / r."""
    lora = split_lora(name)
    assert lora is not None
    assert lora.adapter is not None
    role = Role(lora.adapter)
    base = _spread(f"{lora.module}.base_layer.weight").gain
    assert base is not None
    return Spread(name, "table", gain=LORA_B_GAIN * base * settings.lora_rank(role) / settings.lora_alpha(role))
