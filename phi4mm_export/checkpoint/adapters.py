"""LoRA adapters: pairs of matrices and their scale, from a checkpoint's shards or from a PEFT folder.

The scale always comes from the adapter's own settings: `vision_lora` and `speech_lora` of config.json for tensors
in the shards, adapter_config.json for a folder. Settings that would change the arithmetic are refused by name.

Source: PEFT 0.21, `LoraConfig`, `get_pattern_key`, `LoraModel._create_and_replace`, `LoraLayer.update_layer`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from phi4mm_export.checkpoint.source import TensorSource
from phi4mm_export.errors import CheckpointError, counted, some
from phi4mm_export.spec.json_fields import Fields, shown
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.names import ADAPTED_MODULES, split_lora

Number = TypeVar("Number", int, float)

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

UNSUPPORTED_SETTINGS: tuple[str, ...] = (
    "use_dora",
    "fan_in_fan_out",
    "modules_to_save",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "megatron_config",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "ensure_weight_tying",
)
"""Settings of PEFT that change what is computed or what is stored; falsy values switch them off."""

PLAIN_INITS: frozenset[object] = frozenset({True, False, None, "gaussian", "eva", "orthogonal"})
"""`init_lora_weights` that leave the base weights as they are; others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract
from the base while training, so the saved pair does not belong to the published weights."""


@dataclass(frozen=True)
class LoraPair:
    """One module's adapter: y += scale * (x @ a.T) @ b.T.

    a: [r, in]; b: [out, r]; scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
    """

    a: TensorSource
    b: TensorSource
    scale: float

    @property
    def rank(self) -> int:
        """r, the number of rows of `a`."""
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """One role's pairs by canonical module, in layer order; `source` is where they came from, for messages."""

    role: Role
    source: str
    pairs: Mapping[str, LoraPair]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that occurs, smallest first."""
        return tuple(sorted({pair.rank for pair in self.pairs.values()}))

    @property
    def scales(self) -> tuple[float, ...]:
        """Every scale that occurs, smallest first."""
        return tuple(sorted({pair.scale for pair in self.pairs.values()}))


@dataclass(frozen=True)
class LoraSettings:
    """Rank and alpha of every module, as one adapter's settings state them."""

    place: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_stabilized: bool = False

    def rank_of(self, module: str) -> int:
        """r of a module: the first pattern that matches its path, else the common r."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def parse_settings(fields: Fields) -> LoraSettings:
    """r, alpha, patterns and rsLoRA of an adapter_config.json or a `vision_lora` section.

    Raises CheckpointError naming the key for every setting that this arithmetic does not cover.
    """
    peft_type = fields.get("peft_type")
    if peft_type is not None and peft_type != "LORA":
        fields.refuse("peft_type", '"LORA"', fix="other adapter types are not supported")
    for key in UNSUPPORTED_SETTINGS:
        if fields.get(key):
            fields.refuse(key, "off", fix=f"adapters with {key} are not supported: merge the adapter with PEFT first")
    if fields.get("bias") not in (None, "none"):
        fields.refuse("bias", '"none"', fix="adapters that change biases are not supported: merge with PEFT first")
    init = fields.get("init_lora_weights")
    if not isinstance(init, bool | str | None) or (init.lower() if isinstance(init, str) else init) not in PLAIN_INITS:
        fields.refuse(
            "init_lora_weights",
            "a start that leaves the base weights alone",
            fix="convert the adapter to plain LoRA (PEFT: path_initial_model_for_weight_conversion)",
        )
    ranks, alphas = _patterns(fields, "rank_pattern"), _patterns(fields, "alpha_pattern")
    return LoraSettings(
        place=fields.place,
        rank=fields.integer("r"),
        alpha=fields.number("lora_alpha", positive=False),
        rank_pattern={key: ranks.integer(key) for key in ranks},
        alpha_pattern={key: alphas.number(key, positive=False) for key in alphas},
        rank_stabilized=fields.boolean("use_rslora", False),
    )


def pair_up(
    tensors: Iterable[TensorSource],
    role: Role,
    settings: LoraSettings,
    modules: Mapping[str, tuple[int, int]],
    *,
    source: str,
) -> Adapter:
    """The adapter made of `tensors`, whose canonical names end in `.lora_A...` or `.lora_B...`.

    modules: canonical module -> (out, in) of every projection that may carry an adapter; some of them may
    have none. Raises CheckpointError for unknown modules, halves without their other half, and shapes that
    disagree with the module, with the other half or with the rank in `settings`.
    """
    halves: dict[str, dict[str, TensorSource]] = {}
    for tensor in tensors:
        lora = split_lora(tensor.name)
        if lora is None or lora.module not in modules:
            raise CheckpointError(
                f"{tensor.stored_name} is no LoRA matrix of a projection that this model has",
                where=tensor.where,
                fix=f"adapters are supported on {some(ADAPTED_MODULES)} of the decoder's layers",
            )
        other = halves.setdefault(lora.module, {}).setdefault(lora.half, tensor)
        if other is not tensor:
            raise CheckpointError(
                f"{other.stored_name} and {tensor.stored_name} are the same tensor of the {role} adapter",
                where=tensor.where,
                fix="keep one of the two",
            )
    _refuse_half_pairs(halves, role)
    pairs = {module: _pair(module, halves[module], settings, modules[module]) for module in modules if module in halves}
    return Adapter(role, source, pairs)


def _refuse_half_pairs(halves: Mapping[str, Mapping[str, TensorSource]], role: Role) -> None:
    alone = {module: pair for module, pair in halves.items() if len(pair) == 1}
    if alone:
        first = next(iter(next(iter(alone.values())).values()))
        lost = [f"{module}.lora_{'B' if 'A' in pair else 'A'}" for module, pair in alone.items()]
        raise CheckpointError(
            f"{counted(len(alone), 'module')} of the {role} adapter with one matrix of two; missing: {some(lost)}",
            where=first.where,
            fix="fetch the adapter again, or save it whole",
        )


def _pair(module: str, pair: Mapping[str, TensorSource], settings: LoraSettings, shape: tuple[int, int]) -> LoraPair:
    rank, (out, width) = settings.rank_of(module), shape
    for tensor, wanted in ((pair["A"], (rank, width)), (pair["B"], (out, rank))):
        if tensor.shape != wanted:
            raise CheckpointError(
                f"{tensor.stored_name} has shape {list(tensor.shape)}, expected {list(wanted)} "
                f"(r {rank} by {settings.place}, {module} is {out} x {width})",
                where=tensor.where,
                fix="pass the adapter that was trained on this model, with its own settings",
            )
    return LoraPair(pair["A"], pair["B"], settings.scale_of(module))


def _by_pattern(table: Mapping[str, Number], module: str, common: Number) -> Number:
    """PEFT's rule: the first key that matches the whole path, or its end after a dot, as a regular expression."""
    for pattern, value in table.items():
        if re.match(_anchored(pattern), module):
            return value
    return common


def _patterns(fields: Fields, key: str) -> Fields:
    """`rank_pattern` or `alpha_pattern`, whose keys are regular expressions."""
    table = fields.section(key)
    for pattern in table:
        try:
            re.compile(_anchored(pattern))
        except re.error as err:
            raise CheckpointError(
                f"{key} holds {shown(pattern)}, which is no regular expression: {err}",
                where=fields.where(key),
                fix=f"correct {key}",
            ) from err
    return table


def _anchored(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"
