"""What `phi4mm build` is asked for: every choice of the chain from a checkpoint to a judged and described package.

One frozen dataclass per table of a recipe file; `None` leaves a choice to the step itself. Reading them from TOML is
`build_recipe_read`'s work, the words for people are in docs/build.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from phi4mm_export.errors import UsageError
from phi4mm_export.spec.contract import Component, PackageLayout, Provider
from phi4mm_export.spec.model import Role
from phi4mm_export.spec.on_disk import home_expanded, is_folder
from phi4mm_export.spec.quantization import Method, Order
from phi4mm_export.spec.recipe import INT4_BLOCK, INT8_BLOCK, LoraForm, Precision, Recipe

BUILTIN = "builtin"
"""The word for samples that are made up from a seed."""
AGAINST_MODEL, AGAINST_NONE = "model", "none"
"""What an evaluation compares with: the checkpoint that is built, or nothing; else the path of a float package."""
WORDS = (BUILTIN, AGAINST_MODEL, AGAINST_NONE)
GIVEN = "given"
"""What a recorded recipe says in place of a path: something was given, and it has to be given again."""
DEFAULT_LIBRARY, DEFAULT_TASK = "onnxruntime-genai", "image-text-to-text"


class AdapterChoice(StrEnum):
    """The adapter of the merged and branch forms."""

    VISION = "vision"
    SPEECH = "speech"
    NONE = "none"


class HeadOfTwo(StrEnum):
    """Which head counts when a tied one is also stored."""

    STORED = "stored"
    TIED = "tied"


@dataclass(frozen=True)
class ExportChoices:
    """Table [export]: as the options of `phi4mm export`. memory_budget in bytes."""

    ep: Provider = Provider.CPU
    precision: Precision = Precision.INT8
    encoder_precision: Precision | None = None
    embedding_precision: Precision | None = None
    lora_precision: Precision | None = None
    block_size: int | None = None
    accuracy_level: int | None = None
    rotate: bool | None = None
    lora: LoraForm = LoraForm.GATED
    adapter: AdapterChoice | None = None
    layout: PackageLayout = PackageLayout.FLAT
    full_logits: bool = False
    max_length: int | None = None
    memory_budget: int | None = None
    release_arena: bool = False
    original_audio_limit: bool = False
    head: HeadOfTwo | None = None

    def recipe(self) -> Recipe:
        """The export's recipe. Raises UsageError for combinations that no runtime can serve."""
        role = None if self.adapter is AdapterChoice.NONE else Role(self.adapter or AdapterChoice.VISION)
        return Recipe.resolve(
            provider=self.ep,
            precision=self.precision,
            encoder_precision=self.encoder_precision,
            embedding_precision=self.embedding_precision,
            lora_precision=self.lora_precision,
            block_size=self.block_size,
            accuracy_level=self.accuracy_level,
            rotate=self.rotate,
            lora=self.lora,
            adapter=role,
            layout=self.layout,
            full_logits=self.full_logits,
        )


@dataclass(frozen=True)
class QuantizeChoices:
    """Table [quantize.COMPONENT]: as the options of `phi4mm quantize`.

    calibration: samples of this graph alone, in place of the recipe's; max_rel_l2: the gate on samples left out;
    torch_device: recorded by its kind, whichever of its kind it was.
    """

    method: Method = Method.GPTQ
    bits: int = 4
    block_size: int | None = None
    symmetric: bool = True
    num_samples: int | None = None
    damp: float = 0.01
    order: Order = Order.ACT
    sequential: bool = True
    bias_correction: bool = True
    rotate: bool | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    accuracy_level: int | None = None
    seed: int = 0
    torch_device: str | None = None
    max_rel_l2: float = 0.5
    calibration: str | None = None

    @property
    def block(self) -> int:
        """Weights per scale."""
        return self.block_size or (INT4_BLOCK if self.bits == 4 else INT8_BLOCK)


@dataclass(frozen=True)
class EvaluateChoices:
    """Table [evaluate]: what the finished package is compared with, on what, and which figures it must reach.

    Without images, audio, prompts and text a seeded synthetic set stands in.
    """

    against: str = AGAINST_NONE
    images: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    num_samples: int | None = None
    seed: int = 0
    max_new_tokens: int = 16
    max_text_tokens: int = 128
    min_cosine: float | None = None
    max_rel_l2: float | None = None
    max_kl: float | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The keys under which requests were given."""
        return tuple(key for key, texts in self.sources(str).items() if texts)

    def sources(self, change: Callable[[str], str]) -> dict[str, Any]:
        """The sources of requests by key, each text changed."""
        found = {"images": self.images, "audio": self.audio, "prompts": self.prompts, "text": self.text}
        return {key: tuple(map(change, texts)) for key, texts in found.items()}


@dataclass(frozen=True)
class CardChoices:
    """Table [card]: what the model card says where the source does not know better."""

    title: str | None = None
    license: str | None = None
    base_model: str | None = None
    library_name: str = DEFAULT_LIBRARY
    pipeline_tag: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildRecipe:
    """The whole recipe. model, revision, output and calibration are places, never recorded in a package.

    folder: where the recipe file lies, to which its relative paths refer; None for a named or recorded recipe.
    """

    name: str = "unnamed"
    description: str = ""
    export: ExportChoices = field(default_factory=ExportChoices)
    quantize: Mapping[Component, QuantizeChoices] = field(default_factory=dict)
    evaluate: EvaluateChoices = field(default_factory=EvaluateChoices)
    card: CardChoices = field(default_factory=CardChoices)
    model: str | None = None
    revision: str | None = None
    output: str | None = None
    calibration: str | None = None
    folder: Path | None = None

    def placed(self) -> BuildRecipe:
        """The recipe with the relative paths of its file made complete; hub ids and words stay."""
        if self.folder is None:
            return self
        root = self.folder

        def place(text: str) -> str:
            return text if text in WORDS else str(root / home_expanded(text))

        quantize = {
            part: replace(each, calibration=place(each.calibration) if each.calibration else None)
            for part, each in self.quantize.items()
        }
        in_folder = self.model is not None and is_folder(root / home_expanded(self.model))
        return replace(
            self,
            evaluate=replace(self.evaluate, against=place(self.evaluate.against), **self.evaluate.sources(place)),
            quantize=quantize,
            calibration=place(self.calibration) if self.calibration else None,
            output=place(self.output) if self.output else None,
            model=place(self.model) if in_folder and self.model else self.model,
            folder=None,
        )

    def resolved(self) -> BuildRecipe:
        """Every choice of the export and the block sizes filled in, so that a later default changes nothing.

        Raises UsageError for combinations that no runtime can serve.
        """
        recipe = self.export.recipe()
        export = replace(
            self.export,
            encoder_precision=recipe.encoder_precision,
            embedding_precision=recipe.embedding_precision,
            lora_precision=recipe.lora_precision,
            block_size=recipe.block_size,
            accuracy_level=recipe.accuracy_level,
            rotate=recipe.rotate,
        )
        quantize = {part: replace(each, block_size=each.block) for part, each in self.quantize.items()}
        return replace(self, export=export, quantize=quantize)

    def recorded(self) -> dict[str, Any]:
        """The recipe as a package's manifest holds it: plain values, no places of this machine."""
        quantize = {
            part: replace(
                each,
                calibration=_kind_of(each.calibration) if each.calibration else None,
                torch_device=each.torch_device.partition(":")[0] if each.torch_device else None,
            )
            for part, each in self.quantize.items()
        }
        evaluate = replace(
            self.evaluate, against=_kind_of(self.evaluate.against), **self.evaluate.sources(lambda _: GIVEN)
        )
        placeless = replace(
            self,
            evaluate=evaluate,
            quantize=quantize,
            calibration=_kind_of(self.calibration) if self.calibration else None,
            model=None,
            revision=None,
            output=None,
        )
        return placeless.plain()

    def plain(self) -> dict[str, Any]:
        """The recipe as the tables of its file, in their order, without what is left to the steps."""
        body: dict[str, Any] = {}
        for key in ("name", "description", "model", "revision", "output", "calibration"):
            value = getattr(self, key)
            if value not in (None, ""):
                body[key] = value
        body["export"] = dict(_plain(self.export))
        if self.quantize:
            body["quantize"] = {part.value: dict(_plain(each)) for part, each in self.quantize.items()}
        body["evaluate"] = dict(_plain(self.evaluate))
        body["card"] = dict(_plain(self.card))
        return body


def _kind_of(source: str) -> str:
    return source if source in WORDS else GIVEN


def _plain(choices: Any) -> Iterator[tuple[str, Any]]:
    for each in fields(choices):
        value = getattr(choices, each.name)
        if value is None or value == ():
            continue
        if isinstance(value, StrEnum):
            value = value.value
        yield each.name, list(value) if isinstance(value, tuple) else value


def check_places(recipe: BuildRecipe, *, with_statistics: bool = False) -> None:
    """Raise UsageError for a GPTQ step without samples or kept statistics, and for graphs that cannot be quantized."""
    for component, choices in recipe.quantize.items():
        if component is Component.EMBEDDING:
            raise UsageError(
                "the embedding graph has no linear layers: it looks rows up in a table",
                where=f"{recipe.name}: quantize.embedding",
                fix='store the table in integers with export.embedding_precision = "int8"',
            )
        samples = choices.calibration or recipe.calibration or with_statistics
        if choices.method is Method.GPTQ and not samples:
            raise UsageError(
                f"the recipe calibrates the {component} graph, and no samples were given",
                where=f"{recipe.name}: calibration",
                fix="give --calibration a folder, list, glob or archive; builtin makes some up, real ones are better",
            )
