"""README.md of a built package: front matter for the hub, and what a user has to know before running it.

Everything comes from the manifest, the recipe and figures that were handed in: no clock, host, user or path, so the
same build writes the same card.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from phi4mm_export.package.manifest import MIN_RUNTIME, Manifest, Reproducibility
from phi4mm_export.package.source_card import CARD_FILE as CARD_FILE
from phi4mm_export.package.source_card import SourceCard
from phi4mm_export.spec.build_recipe import DEFAULT_TASK, GIVEN, BuildRecipe
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.recipe import LoraForm
from phi4mm_export.spec.sizes import format_bytes

UNKNOWN_LICENSE = "unknown"
DIGITS = 4
"""Significant digits of a measured figure."""
SNIPPET = """\
import onnxruntime_genai as og

model = og.Model("PACKAGE")  # the folder that holds this file
processor = model.create_multimodal_processor()
tokens = og.Tokenizer(model).create_stream()
prompt = "<|user|>\\n<|image_1|>\\nWhat is shown?<|end|>\\n<|assistant|>\\n"
inputs = processor(prompt, images=og.Images.open("page.png"))  # an upright PNG without transparency

params = og.GeneratorParams(model)
params.set_search_options(max_length=inputs["input_ids"].as_numpy().shape[1] + 64, do_sample=False)
generator = og.Generator(model, params)
generator.set_inputs(inputs)
while not generator.is_done():
    generator.generate_next_token()
    print(tokens.decode(generator.get_next_tokens()[0]), end="", flush=True)"""
"""Audio in the same way: `<|audio_1|>` and `audios=og.Audios.open("clip.wav")`."""


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes of a process at its peak, as `phi4mm plan` derives them; `both` with images and audio in one process."""

    image: int
    audio: int
    both: int
    max_length: int
    prompt_tokens: int
    crops: int
    seconds: float


@dataclass(frozen=True)
class CardFacts:
    """What a card is written from. gates: figures per quantized graph; evaluation: figures or None; rope_switch: tokens
    after which the decoder rotates otherwise, None if it does not."""

    manifest: Manifest
    recipe: BuildRecipe
    recipe_toml: str
    source: SourceCard
    memory: MemoryFigures
    rope_switch: int | None
    gates: Mapping[str, Mapping[str, Any]]
    evaluation: Mapping[str, Any] | None


def card_text(facts: CardFacts) -> str:
    """The whole README.md."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = (resources.files("phi4mm_export.package") / "data" / "model_card.md.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(_context(facts))


def _context(facts: CardFacts) -> dict[str, Any]:
    manifest, recipe = facts.manifest, facts.recipe
    files = [(entry.name, f"{entry.size:,}") for entry in manifest.files]
    return {
        "front_matter": [(key, json.dumps(value, ensure_ascii=False)) for key, value in _front_matter(facts)],
        "title": _line(recipe.card.title or f"Phi-4-multimodal for ONNX Runtime GenAI: {recipe.name}"),
        "summary": _summary(facts),
        "install": ("onnxruntime-genai-cuda" if _on_cuda(facts) else "onnxruntime-genai") + f">={MIN_RUNTIME}",
        "snippet": SNIPPET,
        "rope_switch": f"{facts.rope_switch:,}" if facts.rope_switch else "4,096",
        "recipe_name": _code(recipe.name),
        "recipe_description": f": {_line(recipe.description)}." if recipe.description else "",
        "recipe_toml": facts.recipe_toml.strip(),
        "source": _source(facts),
        "gates": [_gate_row(name, gate) for name, gate in facts.gates.items()],
        "evaluation": None if facts.evaluation is None else _evaluation(facts.evaluation),
        "files": files,
        "total": f"{sum(entry.size for entry in manifest.files):,}",
        "memory": _memory(facts),
        "limits": list(_limits(facts)),
        "rebuild": _rebuild_command(facts),
        "rebuild_samples": " and the same calibration samples" if facts.gates else "",
        "reproducibility": _reproducibility(facts),
    }


def _front_matter(facts: CardFacts) -> Iterable[tuple[str, Any]]:
    source, card = facts.source, facts.recipe.card
    yield "license", card.license or source.license or UNKNOWN_LICENSE
    if not card.license and source.license_name:
        yield "license_name", source.license_name
    link = source.license_link or (source.license_text[0] if source.license_text else None)
    if not card.license and link:
        yield "license_link", link
    base = base_model(facts)
    if base is not None:
        yield "base_model", base
    yield "base_model_relation", "quantized"
    yield "library_name", card.library_name
    yield "pipeline_tag", card.pipeline_tag or source.pipeline_tag or DEFAULT_TASK
    yield "tags", list(dict.fromkeys(("onnx", "onnxruntime-genai", "phi4mm", *card.tags)))


def base_model(facts: CardFacts) -> str | None:
    """The hub id of the model: as the recipe says, as it was asked for, or as its config names itself."""
    stated = facts.manifest.source.model if facts.manifest.source else None
    return facts.recipe.card.base_model or stated or facts.source.base_model


def _summary(facts: CardFacts) -> str:
    base = base_model(facts)
    origin = f"[{_line(base)}](https://huggingface.co/{_line(base)})" if base else "A Phi-4-multimodal checkpoint"
    device = "CUDA" if _on_cuda(facts) else "the CPU"
    known = facts.recipe.card.license or facts.source.license
    licence = (
        "The licence is that of the source's own card."
        if facts.source.license and not facts.recipe.card.license
        else "The licence was stated by whoever built this."
        if known
        else "**The licence is unknown**: the source states none. Ask where the checkpoint comes from."
    )
    return f"{origin} as four ONNX graphs for ONNX Runtime GenAI on {device}: text, images and audio. {licence}"


def _source(facts: CardFacts) -> str:
    source, tool = facts.manifest.source, f"phi4mm {facts.manifest.tool.version}"
    if source is not None and source.model:
        commit = f" at commit `{source.commit}`" if source.commit else ""
        return f"Built from `{_code(source.model)}`{commit} by {tool}."
    return f"Built by {tool} from a folder, which is known by the digests of its files alone."


def _gate_row(name: str, gate: Mapping[str, Any]) -> list[str]:
    judged = f"{gate['samples']} {gate['judged_on']}, `{gate['output']}`"
    figures = [gate[key] for key in ("mean_rel_l2", "worst_rel_l2", "mean_cosine", "rounded_mean_rel_l2", "allowed")]
    return [name, judged, *(_figure(value) for value in figures)]


def _evaluation(figures: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("relative_l2_mean", "relative_l2_worst", "cosine_mean", "cosine_worst", "max_abs")
    gates = []
    for gate in figures["gates"]:
        bound = "at least" if gate["name"].startswith("min") else "at most"
        found = f"{_figure(gate['figure'])} ({gate['where']})"
        gates.append(f"{gate['name']} {bound} {_figure(gate['threshold'])}, found {found}")
    return {
        "inputs": figures["inputs"],
        "components": [
            [each["component"], str(each["samples"]), *(_figure(each[key]) for key in keys)]
            for each in figures["components"]
        ],
        "modes": [
            [row["mode"], str(row["requests"]), _figure(row["kl_mean"]), _share(row["top1"]),
             f"{row['identical']} of {row['requests']}"]
            for row in figures["modes"]
        ],
        "gates": gates,
    }  # fmt: skip


def _memory(facts: CardFacts) -> str:
    figures = facts.memory
    single, both = max(figures.image, figures.audio), figures.both
    place = "device memory" if _on_cuda(facts) else "resident memory"
    more = (both - single) * 100 // max(single, 1)
    if more <= 0:
        advice = (
            "not more than the larger one alone, because the encoders give their memory back: one process is enough"
        )
    elif more < WORTH_APART:
        advice = f"{more} % more than the larger one, so both modalities may share a process"
    else:
        advice = f"{more} % more than the larger one: where memory is short, serve one modality per process"
    return (
        f"By the figures of `phi4mm plan` for a prompt of {figures.prompt_tokens:,} tokens, {figures.crops} crops and "
        f"{figures.seconds:g} seconds, with the cache for {figures.max_length:,} tokens: images alone "
        f"{format_bytes(figures.image)} of {place} at the peak, audio alone {format_bytes(figures.audio)}, both in one "
        f"process {format_bytes(both)}, {advice}. The cache is reserved when a generator opens: ask for no larger "
        "`max_length` than you need."
    )


WORTH_APART = 10
"""Percent of memory from which a process per modality is worth its trouble."""


def _limits(facts: CardFacts) -> Iterable[str]:
    export = facts.recipe.export
    if export.lora is LoraForm.GATED:
        yield (
            f"Needs onnxruntime-genai {MIN_RUNTIME} or newer: older ones do not feed `input_ids`, by which the decoder "
            "picks its adapter (none for text, vision for images, speech for audio alone)."
        )
    elif export.lora is LoraForm.ADAPTERS:
        yield "ONNX Runtime GenAI 0.9 to 0.18 never applies the adapter files: only text gets the right weights."
    else:
        held = ", ".join(entry.role.value for entry in facts.manifest.adapters) or "no"
        yield f"The decoder holds the {held} adapter in every mode; other modes run with its weights too."
    yield DEVICE_ON_CUDA if _on_cuda(facts) else DEVICE_ON_CPU
    yield NVIDIA_AWQ
    yield "One prompt with images or audio at a time: the runtime cuts batches with images, and beams do not work."
    yield "A second image in a later turn needs a new generator; text turns may follow."
    switch = f"{facts.rope_switch:,}" if facts.rope_switch else "4,096"
    yield (
        f"Past {switch} tokens in all the model rotates its keys differently, and the runtime does not compute the "
        "cached ones again: start a new generator with the whole sequence there."
    )
    yield "The runtime reads upright PNG and JPEG, and WAV, FLAC and MP3 of at least 25 ms; convert the rest before."
    if not export.full_logits:
        yield "The decoder returns the logits of the last position only."


DEVICE_ON_CUDA = (
    "Device 0 only: on any other the runtime fails (onnxruntime-genai#1545, onnxruntime-genai#730), so the config says "
    '`device_id` `"0"`. To use another GPU, mask the others: `CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1`.'
)
DEVICE_ON_CPU = (
    "Made for the CPU. A GPU needs a package of its own, in float16; of several GPUs only device 0 works "
    "(onnxruntime-genai#1545, onnxruntime-genai#730): mask the others with `CUDA_VISIBLE_DEVICES`."
)
NVIDIA_AWQ = (
    "ONNX Runtime's quantization method `nvidia_awq` cannot work on these graphs: it makes its own calibration inputs "
    "from a text data set (`input_ids`, `attention_mask`, `position_ids` and empty keys) and takes no others. This "
    "decoder takes `inputs_embeds` and no `position_ids`, the encoders take pictures and sound. `phi4mm quantize` "
    "calibrates each graph on what it is really fed."
)
"""Source: NVAWQWeightOnlyQuantConfig in onnxruntime 1.32, quantization/matmul_nbits_quantizer.py."""


def _rebuild_command(facts: CardFacts) -> str:
    words = ["phi4mm rebuild README.md"]
    source = facts.manifest.source
    if source is None or not source.model:
        words.append("--model CHECKPOINT")
    recorded = facts.recipe.recorded()
    needs = [recorded.get("calibration"), *(each.get("calibration") for each in recorded.get("quantize", {}).values())]
    if GIVEN in needs:
        words.append("--calibration SAMPLES")
    return " ".join([*words, "-o rebuilt"])


def _reproducibility(facts: CardFacts) -> str:
    weakest = [e.name for e in facts.manifest.files if e.reproducibility is Reproducibility.SAME_MACHINE]
    if facts.evaluation is not None or facts.gates:
        weakest.append(CARD_FILE)
    if not weakest:
        return "With the same versions it gives them on any machine."
    names = ", ".join(f"`{name}`" for name in sorted(set(weakest)))
    return (
        f"With the same versions it gives them on the same machine; elsewhere {names} may differ, because ONNX Runtime "
        "took part in them, and every other file is the same."
    )


def _on_cuda(facts: CardFacts) -> bool:
    return facts.recipe.export.ep is Provider.CUDA


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.{DIGITS}g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _line(text: str) -> str:
    """One line of text in which no Markdown or HTML starts."""
    return "".join(f"\\{char}" if char in "\\`*_[]<>|" else char for char in text)


def _code(text: str) -> str:
    return text.replace("`", "'")
