"""Made-up media for `--calibration builtin`: pages, clips and prompts drawn from seeded numbers.

Pages hold what documents hold (invoices, tables, running text, photographs) in several sizes; clips have the pitch,
formants and pauses of speech. A stand-in where no real documents may be used: real ones calibrate better.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phi4mm_export.errors import MissingExtraError, UsageError
from phi4mm_export.runtime.audio import SAMPLE_RATE_HZ, wav_bytes
from phi4mm_export.runtime.calibration_sources import CalibrationFile, SampleKind

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

DEFAULT_COUNT = 16
MAX_COUNT = 4096
PAGE_SIZES = ((448, 448), (620, 877), (877, 620), (896, 896), (640, 480), (1200, 420), (430, 930), (1240, 1754))
"""Width and height in pixels: one tile to sixteen, upright and across."""
VOWELS_HZ = ((730, 1090, 2440), (530, 1840, 2480), (270, 2290, 3010), (570, 840, 2410), (300, 870, 2240))
"""The first three formants of five vowels (Peterson and Barney, 1952)."""
WORDS = (  # noqa: SIM905 - a page of words reads better than a page of quotes
    "invoice total amount due payment delivery order account number date customer address street city service month "
    "paid balance tax net gross quantity price unit item description reference bank transfer please within days "
    "Rechnung Betrag Datum Lieferung Menge Preis Summe facture montant livraison prix pedido importe cantidad fecha "
    "the of and to in is for on that with was this are be by from or at an report table figure result model data"
).split()
QUESTIONS = (
    "Summarise the text in two sentences.",
    "Which dates and amounts are named?",
    "Write a short, polite answer to this letter.",
    "Explain this to a child of ten years.",
    "Translate the text into French.",
    "Return the important fields as JSON.",
)
TASKS = {
    SampleKind.IMAGE: ("Transcribe this page.", "Return the fields of this document as JSON.", "What does it show?"),
    SampleKind.AUDIO: ("Transcribe the audio to text.", "What is said?", "Translate the recording into German."),
}
Rng = np.random.Generator
U8 = NDArray[np.uint8]


def builtin_files(kind: SampleKind, count: int, seed: int) -> tuple[CalibrationFile, ...]:
    """`count` made-up files of a kind, each drawn from the seed and its own number alone.

    Prompts are texts, texts with a page, with a clip and with both, in turn: several files each, `count` prompts.
    """
    if not 1 <= count <= MAX_COUNT:
        raise UsageError(f"{count:,} samples were asked for, expected 1 to {MAX_COUNT:,}", where="--num-samples")
    if kind is SampleKind.ARRAYS:
        raise UsageError(
            "there is no builtin set for a plain ONNX file",
            where="--calibration builtin",
            fix="give a folder of .npz files, one a sample, whose keys are the graph's inputs",
        )
    files: list[CalibrationFile] = []
    for number in range(count):
        stem = f"builtin/{number:04d}"
        if kind is SampleKind.IMAGE or (kind is SampleKind.PROMPT and number % 4 in (1, 3)):
            files.append(_made(f"{stem}.png", page, seed, number))
        if kind is SampleKind.AUDIO or (kind is SampleKind.PROMPT and number % 4 in (2, 3)):
            files.append(_made(f"{stem}.wav", speech, seed, number))
        if kind is SampleKind.PROMPT:
            files.append(_made(f"{stem}.txt", prompt, seed, number))
    return tuple(files)


def _made(name: str, draw: Callable[[int, int], bytes], seed: int, number: int) -> CalibrationFile:
    return CalibrationFile(name, lambda: draw(seed, number))


def prompt(seed: int, number: int) -> bytes:
    """A task in UTF-8: about a text that follows, or about the page or clip of the same number."""
    rng = np.random.default_rng([seed, number, 3])
    if number % 4 == 0:
        text = " ".join(_sentence(rng) for _ in range(int(rng.integers(4, 24))))
        return f"{rng.choice(QUESTIONS)}\n\n{text}".encode()
    kind = SampleKind.AUDIO if number % 4 == 2 else SampleKind.IMAGE
    return str(rng.choice(TASKS[kind])).encode()


def page(seed: int, number: int) -> bytes:
    """A PNG of one page."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as err:
        raise MissingExtraError("Pillow", "media", "drawing the builtin pages") from err

    rng = np.random.default_rng([seed, number, 1])
    width, height = PAGE_SIZES[number % len(PAGE_SIZES)]
    paper = int(rng.integers(236, 256))
    sheet = Image.new("RGB", (width, height), (paper, paper, int(paper - rng.integers(0, 12))))
    draw = ImageDraw.Draw(sheet)
    kinds = (_invoice, _photograph, _table, _letter)
    kinds[int(rng.integers(len(kinds))) if number >= len(kinds) else number](sheet, draw, rng)
    pixels = np.asarray(sheet).astype(np.float64) + rng.normal(0, float(rng.uniform(0, 4)), (height, width, 1))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def speech(seed: int, number: int) -> bytes:
    """A 16 kHz WAV of one to nine seconds: vowels on a moving pitch, hisses and pauses."""
    rng = np.random.default_rng([seed, number, 2])
    pieces: list[NDArray[np.float64]] = []
    for _ in range(int(rng.integers(6, 40))):
        time = np.arange(int(rng.uniform(0.05, 0.3) * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
        envelope = np.sin(np.pi * (np.arange(time.size) + 0.5) / time.size)
        sound = rng.choice(3, p=[0.65, 0.2, 0.15])
        if sound == 0:
            pieces.append(envelope * _vowel(rng, time))
        elif sound == 1:
            noise = rng.normal(0, 0.1, time.size + 1)
            pieces.append(envelope * np.diff(noise))
        else:
            pieces.append(np.zeros(time.size))
    samples = np.concatenate(pieces) + rng.normal(0, 10 ** rng.uniform(-4, -2), sum(p.size for p in pieces))
    scaled = np.rint(samples / max(1e-9, float(np.abs(samples).max())) * rng.uniform(3000, 28000)).astype("<i2")
    return wav_bytes(scaled.tobytes(), tag=1, width=2)


def _vowel(rng: Rng, time: NDArray[np.float64]) -> NDArray[np.float64]:
    """Harmonics of a pitch, weighted by how near they are to the formants."""
    pitch = float(rng.uniform(90, 240))
    formants = np.array(VOWELS_HZ[int(rng.integers(len(VOWELS_HZ)))]) * rng.uniform(0.9, 1.15)
    harmonics = pitch * np.arange(1, int(3800 / pitch))
    weight = np.sum(1 / (1 + ((harmonics[:, None] - formants) / 90) ** 2) / np.array([1, 2, 4]), axis=1)
    phase = 2 * np.pi * np.cumsum(np.full(time.size, 1 / SAMPLE_RATE_HZ) * (1 + 0.1 * rng.uniform(-1, 1) * time))
    return np.asarray(np.sum(weight[:, None] * np.sin(harmonics[:, None] * phase), axis=0))


def _invoice(sheet: Image.Image, draw: ImageDraw.ImageDraw, rng: Rng) -> None:
    width, height = sheet.size
    _write(sheet, rng, (30, 24), str(rng.choice(WORDS)).upper() + " GmbH", 2)
    for line in range(4):
        _write(sheet, rng, (30, 70 + 16 * line), _words(rng, 3), 1)
    _write(sheet, rng, (width // 2, 70), f"No. {rng.integers(10**6, 10**7)}  {_date(rng)}", 1)
    _grid(sheet, draw, rng, (30, 150, width - 30, max(220, int(height * 0.75))), 4)
    _write(sheet, rng, (width // 2, int(height * 0.8)), f"TOTAL {rng.integers(10, 99999)}.{rng.integers(10, 99)}", 2)


def _table(sheet: Image.Image, draw: ImageDraw.ImageDraw, rng: Rng) -> None:
    width, height = sheet.size
    _write(sheet, rng, (24, 20), _words(rng, 4), 2)
    _grid(sheet, draw, rng, (24, 60, width - 24, height - 24), int(rng.integers(3, 8)))


def _letter(sheet: Image.Image, draw: ImageDraw.ImageDraw, rng: Rng) -> None:
    width, height = sheet.size
    size = int(rng.integers(1, 3))
    for top in range(30, height - 40, 16 * size):
        if rng.random() > 0.12:
            _write(sheet, rng, (30, top), _words(rng, max(2, width // (50 * size))), size)
    draw.line([(30, height - 24), (width // 3, height - 30 - int(rng.integers(30)))], fill=(20, 20, 120), width=2)


def _photograph(sheet: Image.Image, draw: ImageDraw.ImageDraw, rng: Rng) -> None:
    """Soft coloured noise at three scales with a few sharp shapes on it."""
    from PIL import Image as Images

    width, height = sheet.size
    pixels = np.zeros((height, width, 3))
    for cells, weight in ((4, 0.6), (17, 0.3), (61, 0.15)):
        coarse = Images.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        pixels += weight * np.asarray(coarse.resize((width, height), Images.Resampling.BICUBIC), np.float64)
    sheet.paste(Images.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)))
    for _ in range(int(rng.integers(3, 9))):
        left, top = int(rng.integers(0, width - 40)), int(rng.integers(0, height - 40))
        box = (left, top, left + int(rng.integers(20, width // 2)), top + int(rng.integers(20, height // 2)))
        colour = tuple(int(c) for c in rng.integers(0, 256, 3))
        (draw.ellipse if rng.random() < 0.5 else draw.rectangle)(box, fill=colour)


def _grid(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, rng: Rng, box: tuple[int, int, int, int], columns: int
) -> None:
    left, top, right, bottom = box
    step = int(rng.integers(18, 34))
    for row, y in enumerate(range(top, bottom, step)):
        if row == 0 or rng.random() < 0.8:
            draw.line([(left, y), (right, y)], fill=(90, 90, 90))
        for column in range(columns):
            x = left + column * (right - left) // columns
            text = _words(rng, 1) if column == 0 or row == 0 else f"{rng.integers(0, 10**4)}.{rng.integers(10, 99)}"
            if y + step < bottom:
                _write(sheet, rng, (x + 4, y + 3), text, 1)


def _write(sheet: Image.Image, rng: Rng, at: tuple[int, int], text: str, scale: int) -> None:
    """One line in Pillow's own bitmap letters, which need no font library; cut off at the paper's edge."""
    from PIL import Image as Images
    from PIL import ImageDraw as Drawing
    from PIL import ImageFont

    font: Any = ImageFont.load_default_imagefont()
    left, top, right, bottom = (int(side) for side in font.getbbox(text))
    mask = Images.new("L", (max(1, right - left), max(1, bottom - top)), 0)
    Drawing.Draw(mask).text((0, 0), text, fill=255, font=font)
    mask = mask.resize((mask.width * scale, mask.height * scale), Images.Resampling.BICUBIC)
    ink = int(rng.integers(0, 90))
    sheet.paste((ink, ink, min(255, ink + int(rng.integers(0, 40)))), at, mask)


def _words(rng: Rng, count: int) -> str:
    return " ".join(str(word) for word in rng.choice(WORDS, count))


def _sentence(rng: Rng) -> str:
    return _words(rng, int(rng.integers(5, 16))).capitalize() + "."


def _date(rng: Rng) -> str:
    return f"{rng.integers(1, 29):02d}.{rng.integers(1, 13):02d}.20{rng.integers(10, 30)}"
