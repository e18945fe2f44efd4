"""What stands behind a finding: how the runtime shows it, and where it is known upstream.

Messages were observed with onnxruntime-genai 0.18 unless a version is named; issue numbers are those of the projects
onnxruntime-genai, onnxruntime and onnxruntime-extensions on GitHub.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One cause. `symptom` is what a user sees; `upstream` are known issues."""

    title: str
    symptom: str = ""
    upstream: tuple[str, ...] = ()


_GENAI, _ORT, _EXT = "onnxruntime-genai", "onnxruntime", "onnxruntime-extensions"
_DEVICE = (f"{_GENAI}#1545", f"{_GENAI}#730")
_ARENA = (f"{_ORT}#14474", f"{_ORT}#22297", f"{_ORT}#23339", f"{_ORT}#16033")
_PARSER = "the runtime refuses the package: JSON Error ... at line L index C"
_REFUSED_SHAPE = "Got invalid dimensions for output: ... Got: N Expected: M"

CAUSES: dict[str, Cause] = {
    "C100": Cause("a graph of the four is not there", "The model path is a directory. Loading a model package ..."),
    "C101": Cause(
        "the graph lacks a tensor that the runtime feeds or reads", "Model input was not found: ..., or no features"
    ),
    "C102": Cause("the graph wants a tensor that the runtime never feeds", "a null-input error at the first request"),
    "C103": Cause(
        "a tensor has another name than the runtime binds", "Model output was not found: ... / Missing Input: ..."
    ),
    "C104": Cause("a tensor has another element type than is fed", "Unexpected input data type. Actual: ..."),
    "C105": Cause(
        "a tensor has another rank than the runtime allocates (image_features must be [tokens, hidden])",
        "text-only prompts or several images fail; " + _REFUSED_SHAPE,
        (f"{_GENAI}#1680",),
    ),
    "C106": Cause("a tensor has other static dims", _REFUSED_SHAPE, (f"{_GENAI}#1680",)),
    "C107": Cause(
        "LoRA stays outside the decoder: inputs with defaults are never fed",
        "image and audio prompts answered as by the bare base model",
        (f"{_GENAI}#1821",),
    ),
    "C110": Cause("features leave a tower in another type than the embedding takes", "Unexpected input data type"),
    "C201": Cause("a graph file is missing or is no graph", "Load model from ... failed: Protobuf parsing failed"),
    "C202": Cause("external data leads out of the package", "the load is refused"),
    "C203": Cause("data left behind: the graph names a data file that is not there", "Cannot parse data from external"),
    "C204": Cause("the data location is no plain file", "the load fails or never returns"),
    "C205": Cause("the data file is a link out of the folder", "the load is refused"),
    "C206": Cause("the data file is cut short", "the load fails; a checker does not notice"),
    "C207": Cause("two tensors overlap in part", "wrong weights without an error"),
    "C220": Cause("dead bytes: data was saved twice into one file", "a package twice its size that answers perfectly"),
    "C221": Cause("dead bytes: no graph refers to a data file", "a package larger than it needs to be"),
    "C300": Cause("genai_config.json is missing or broken", "Error opening genai_config.json / JSON Error"),
    "C301": Cause("genai_config.json starts with a byte order mark", _PARSER),
    "C302": Cause("genai_config.json has a key or a kind of value that the parser refuses", _PARSER),
    "C302 device_id": Cause(
        'the device is a number: the parser wants a string, and only "0" loads (choose with CUDA_VISIBLE_DEVICES)',
        "cuda:device_id - Expected a string but saw a number",
        _DEVICE,
    ),
    "C303": Cause("genai_config.json holds \\u escapes", _PARSER),
    "C311": Cause("the model type is not phi4mm", "Unsupported model_type in config.json: ..."),
    "C313": Cause("a section is missing", "The model path is a directory. Loading a model package ..."),
    "C314": Cause(
        "adapter files are dead: the runtime never opens them",
        "image and audio prompts answered as by the bare base model, as if no picture or sound came",
        (f"{_GENAI}#1821",),
    ),
    "C315": Cause("the vocabulary size is not that of the logits", _REFUSED_SHAPE),
    "C316": Cause("nothing ends an answer", "every answer runs to max_length"),
    "C317": Cause("a token id lies outside the vocabulary", "the Generator is refused"),
    "C319": Cause("another image or audio token id: the runtime has its own built in", "media are not found"),
    "C320": Cause(
        "search.max_length is no possible length", "max_length (N) cannot be greater than model context_length (M)"
    ),
    "C322": Cause("beams do not work with this model type", "the embedding graph fails: {3,1,16} vs {3,5,16}"),
    "C323": Cause("batches do not work with media", "one prompt is cut into rows without an error"),
    "C324": Cause("a log level that ONNX Runtime does not have", "session_log_severity_level >= 0 && ..."),
    "C325": Cause("a library of custom operators is loaded", "Failed to load library ..."),
    "C326": Cause("a number of answers, beams or rows that the runtime refuses", "... must be in [1, 1]"),
    "C331": Cause("a provider that the runtime does not know", "Unknown provider name '...'"),
    "C332": Cause("options for the CPU provider", "the load is refused"),
    "C333": Cause("a CUDA device other than 0", "the load dies with a CUDNN stream mismatch", _DEVICE),
    "C334": Cause("an arena option spelled as ONNX Runtime does, not as a number", "the load throws"),
    "C335": Cause("own session options replace the decoder's", "a tower silently runs on the CPU", (f"{_GENAI}#1699",)),
    "C336": Cause("CUDA graphs give the mask a fixed length", "lengths are misread: wrong answers"),
    "C337": Cause(
        "arena shrinkage names a device without an arena", "Did not find an arena based allocator registered", _ARENA
    ),
    "C338": Cause("terminate_session is set", "every run is stopped"),
    "C342": Cause("a processor file is missing", "[ImageProcessor]: failed to open ... / was not found at: ..."),
    "C344": Cause("the config names a tensor that the graph does not have", "Model input was not found: ..."),
    "C346": Cause("an input that the runtime binds by its literal name has another", "a null-input error"),
    "C347": Cause("the cache's names do not fit the graph", "Missing Input: past_key_values.0.key"),
    "C349": Cause("the config does not name a processor file", "[ImageProcessor]: failed to open ..."),
    "C348": Cause("one name with two element types in two graphs", "Model input type mismatch: ..."),
    "C351": Cause("a size in the config is not that of the graphs", _REFUSED_SHAPE),
    "C352": Cause("a cache that grows by Concat cannot share one buffer", "the computed output shape ... differs"),
    "C370": Cause("the context is longer than the rotary tables", "cos_cache dimension 0 shall not be less than ..."),
    "C371": Cause(
        "the rotary tables change inside the context",
        "fluent nonsense after the switch, when a conversation crosses it",
        (f"{_GENAI}#552", f"{_GENAI}#954"),
    ),
    "C403": Cause("no output aligner in a processor file", "the image mask comes out as zeros, audio sizes as 0"),
    "C404": Cause("crops of another size than the vision graph takes", _REFUSED_SHAPE),
    "C409": Cause(
        "long clips are cut after 30 seconds", "the end of a recording is missing", (f"{_EXT}#994", f"{_EXT}#1053")
    ),
    "C410": Cause("a processor attribute that the operator refuses", "Invalid config: ... / Invalid argument"),
    "C413": Cause("an interpolation that is not the published one", "Invalid interpolation: ..."),
    "C412": Cause("a processor value of another kind", "std::get: wrong index for variant"),
    "C500": Cause("a tokenizer file is missing or broken", "Invalid file: .../tokenizer.json"),
    "C501": Cause(
        "the image or audio placeholder has another id than the runtime has built in",
        "Number of image tokens does not match ..., or 0 against N rows",
        (f"{_GENAI}#1680",),
    ),
    "C502": Cause(
        "a tokenizer class that the runtime does not load", "Unsupported tokenizer class / Empty chat template"
    ),
    "C503": Cause("a list of chat templates", "type must be string, but is array"),
    "C506": Cause("the turn's end does not stop generation", "every answer runs to max_length"),
    "C601": Cause(
        "operators without a kernel on this provider", "Could not find an implementation for ..., or a slow fallback"
    ),
    "C602": Cause(
        "edges of two element types meet in one operator", "Type Error: Type parameter ... bound to different"
    ),
    "C611": Cause("INT8 weights without accuracy_level 4", "13 to 20 times slower decoding on the CPU"),
    "D801": Cause("a file is not what was packaged: damaged on the way, or edited", "anything, or nothing at all"),
    "D802": Cause("a file of the package did not arrive", "the load fails"),
    "D803": Cause("a file that does not belong to the package", ""),
    "D804": Cause("a link in place of a file", "the load may be refused"),
    "D805": Cause("the manifest was edited", ""),
    "D810": Cause(
        "a Git LFS pointer in place of a data file", "the load fails, or weights are read past the end of the file"
    ),
    "D811": Cause(
        "the vision graph was rounded to 4 bits",
        "poor answers about pictures, as with the published int4 GPU package",
        (f"{_GENAI}#1383",),
    ),
    "D812": Cause(
        "the cache of max_length tokens is reserved when a Generator opens",
        "Could not allocate the key-value cache buffer of shape ...",
        (f"{_ORT}#25965",),
    ),
    "D813": Cause("the vision and speech sessions keep their memory", "the arena never shrinks", _ARENA),
}


def cause_of(code: str) -> Cause | None:
    """The cause behind a code, None where the finding says it all."""
    return CAUSES.get(code)
