"""A phi4mm package used from Python with onnxruntime-genai and Pillow alone: text, image, audio, image and audio.

    python examples/phi4mm_ort_genai.py PACKAGE [--image page.png] [--audio question.wav]

Without files of your own it draws a picture and makes a tone. Needs onnxruntime-genai (`og` below) 0.14.1 or later.
"""

from __future__ import annotations

import argparse
import array
import io
import math
import os
import sys
import wave
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before onnxruntime is loaded

import onnxruntime_genai as og
from PIL import Image, ImageDraw, ImageOps

ROPE_SWITCH = 4096
"""Beyond this many tokens the model rotates its keys differently: og needs a new Generator with the whole sequence
then. `phi4mm run` does that; this example stays below."""
NEW_TOKENS = 24
END_OF_TURN = "<|end|>"


def picture_bytes(path: Path | None) -> bytes:
    """An upright RGB picture as PNG. og's own decoder knows only PNG and JPEG, and ends the process on other files."""
    if path is None:
        image = Image.new("RGB", (600, 400), "white")
        ImageDraw.Draw(image).ellipse((150, 50, 450, 350), fill="firebrick")
    else:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def sound_bytes(path: Path | None) -> bytes:
    """A 16 kHz mono WAV of at least 25 ms; convert other recordings before (og dies on shorter clips)."""
    if path is not None:
        return path.read_bytes()
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        samples = array.array("h", (int(8000 * math.sin(2 * math.pi * 440 * i / 16000)) for i in range(16000)))
        if sys.byteorder == "big":
            samples.byteswap()
        sound.writeframes(samples.tobytes())
    return buffer.getvalue()


def start(model: og.Model, processor: og.MultiModalProcessor, prompt: str, **media: object) -> og.Generator:
    """A Generator for one request. A second picture or clip needs a new one; text turns can follow."""
    inputs = processor(f"<|user|>\n{prompt}<|end|>\n<|assistant|>\n", **media)
    prompt_tokens = inputs["input_ids"].as_numpy().shape[1]
    params = og.GeneratorParams(model)
    # The cache is reserved for max_length tokens: ask for no more than the conversation needs.
    params.set_search_options(max_length=min(prompt_tokens + 3 * NEW_TOKENS, ROPE_SWITCH), do_sample=False)
    generator = og.Generator(model, params)
    generator.set_inputs(inputs)
    return generator


def answer(generator: og.Generator, tokenizer: og.Tokenizer) -> str:
    """The greedy answer, up to its end token or NEW_TOKENS."""
    stream = tokenizer.create_stream()
    pieces: list[str] = []
    while len(pieces) < NEW_TOKENS and not generator.is_done():
        generator.generate_next_token()
        pieces.append(stream.decode(generator.get_next_tokens()[0]))
    return "".join(pieces)


def ask_again(generator: og.Generator, tokenizer: og.Tokenizer, prompt: str) -> None:
    """Append a text turn; the pictures and clips of the first turn, and the adapter they chose, stay.

    og 0.18 never runs the last generated token when more are appended, so it is taken back and given again.
    """
    sequence = generator.get_sequence(0)
    end = "" if sequence[-1] == tokenizer.to_token_id(END_OF_TURN) else END_OF_TURN
    turn = f"{end}\n<|user|>\n{prompt}<|end|>\n<|assistant|>\n"
    generator.rewind_to(len(sequence) - 1)
    generator.append_tokens([*sequence[-1:], *tokenizer.encode(turn)])


def main() -> None:
    """Ask in all four modes and print the answers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", type=Path, help="folder that phi4mm export wrote")
    parser.add_argument("--image", type=Path)
    parser.add_argument("--audio", type=Path)
    args = parser.parse_args()

    model = og.Model(str(args.package))
    processor = model.create_multimodal_processor()
    tokenizer = og.Tokenizer(model)
    images = og.Images.open_bytes(picture_bytes(args.image))
    audios = og.Audios.open_bytes(sound_bytes(args.audio))

    print("text: ", answer(start(model, processor, "What is a spectrogram?"), tokenizer))
    shown = start(model, processor, "<|image_1|>\nWhat is shown?", images=images)
    print("image:", answer(shown, tokenizer))
    ask_again(shown, tokenizer, "Which colour has it?")
    print("again:", answer(shown, tokenizer))
    print("audio:", answer(start(model, processor, "<|audio_1|>\nWhat is said?", audios=audios), tokenizer))
    both = start(model, processor, "<|image_1|>\n<|audio_1|>\nAnswer.", images=images, audios=audios)
    print("both: ", answer(both, tokenizer))


if __name__ == "__main__":
    main()
