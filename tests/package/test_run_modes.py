"""og and our own stepping of the four graphs give the same tokens, whatever the prompt holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime_genai as og
import pytest
from support.media_files import clip, picture, sound_bytes

from phi4mm_export.runtime.generate import TextGenerator
from phi4mm_export.runtime.package import open_package
from phi4mm_export.runtime.processor import Request, open_processor
from phi4mm_export.runtime.prompts import build_prompt
from phi4mm_export.runtime.stepping import FourGraphs
from phi4mm_export.spec.contract import Provider
from phi4mm_export.spec.model import Role

STEPS = 16
REQUESTS = {
    "text": ([], []),
    "one picture": ([picture(500, 300)], []),
    "one clip": ([], [clip(1.3)]),
    "a picture and a clip": ([picture(448, 448)], [clip(0.5)]),
    "two pictures of different size": ([picture(300, 300), picture(500, 900, seed=1)], []),
    "two clips of different length": ([], [clip(1.0), clip(3.37, seed=1)]),
    "a clip of 45 seconds": ([], [clip(45.0)]),
}


@pytest.fixture(scope="module")
def generator(gated_package: Path) -> TextGenerator:
    return TextGenerator(open_package(gated_package))


@pytest.fixture(scope="module")
def graphs(gated_package: Path) -> FourGraphs:
    return FourGraphs(open_package(gated_package))


def request_for(generator: TextGenerator, name: str) -> Request:
    pictures, clips = REQUESTS[name]
    prompt = build_prompt("What is said and shown?", num_images=len(pictures), num_audios=len(clips))
    return generator.processor(prompt.text, pictures, clips)


def long_request(generator: TextGenerator, length: int) -> Request:
    """A text request of exactly `length` seeded ids."""
    request = generator.processor("x")
    ids = np.random.default_rng(2).integers(1000, 150000, length)
    return Request({**request.arrays, "input_ids": ids[None].astype(np.int32)}, request.named)


@pytest.mark.parametrize("share_cache", [False, True], ids=["grown cache", "shared cache"])
@pytest.mark.parametrize("name", REQUESTS)
def test_og_and_our_stepping_agree(generator: TextGenerator, graphs: FourGraphs, name: str, share_cache: bool) -> None:
    request = request_for(generator, name)
    answer = generator.generate(request, max_new_tokens=STEPS)
    stops = generator.package.eos_token_ids
    ours = graphs.greedy(request.arrays, STEPS, stop_ids=stops, share_cache=share_cache)
    assert list(answer.token_ids) == ours
    assert answer.prompt_tokens == request.arrays["input_ids"].size


def test_the_four_modes_give_four_different_answers(generator: TextGenerator) -> None:
    names = ["text", "one picture", "one clip", "a picture and a clip"]
    answers = {generator.generate(request_for(generator, name), max_new_tokens=8).token_ids for name in names}
    assert len(answers) == len(names)


def stepped(graphs: FourGraphs, request: Request, calls: list[list[int]]) -> list[int]:
    """The greedy token after each of these calls of the decoder, the first with the request's features."""
    cache, tokens, features = None, [], graphs.features(request.arrays)
    for call in calls:
        step = np.array([call])
        total = (0 if cache is None else cache.length) + len(call)
        embeds = graphs.embedding(step, *(features if cache is None else (None, None)))
        logits, cache = graphs.decoder(embeds, np.ones((1, total), np.int64), cache, input_ids=step)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("name", ["text", "one picture", "one clip", "a picture and a clip"])
def test_an_appended_text_turn_keeps_the_adapter_and_the_cache(
    generator: TextGenerator, gated_package: Path, graphs: FourGraphs, name: str
) -> None:
    request = request_for(generator, name)
    model = og.Model(str(gated_package))
    turn = [int(i) for i in og.Tokenizer(model).encode("<|end|>\n<|user|>\nAnd then?<|end|>\n<|assistant|>\n")]
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=request.input_ids.size + len(turn) + 2 * STEPS, do_sample=False)
    conversation = og.Generator(model, params)
    conversation.set_inputs(request.named)
    for _ in range(STEPS):
        conversation.generate_next_token()
    first = [int(i) for i in conversation.get_sequence(0)[request.input_ids.size :]]
    # og 0.18 never runs the last generated token when more are appended: its keys would stay zero.
    conversation.rewind_to(request.input_ids.size + STEPS - 1)
    conversation.append_tokens(np.array([first[-1], *turn], np.int32))
    for _ in range(STEPS):
        conversation.generate_next_token()
    second = [int(i) for i in conversation.get_sequence(0)[-STEPS:]]
    prompt = [int(i) for i in request.input_ids]
    calls = [prompt, *([token] for token in first[:-1]), [first[-1], *turn], *([token] for token in second[:-1])]
    assert stepped(graphs, request, calls) == [*first, *second]


def test_a_longer_sequence_than_the_short_rope_range_is_run_again_as_a_whole(
    generator: TextGenerator, graphs: FourGraphs
) -> None:
    request = long_request(generator, 4090)
    answer = generator.generate(request, max_new_tokens=20)
    assert generator.package.rope_switch == 4096
    assert answer.restarts == 1
    assert list(answer.token_ids) == graphs.greedy(request.arrays, 20)
    assert list(answer.token_ids) != graphs.greedy(request.arrays, 20, restart=False)


@pytest.mark.parametrize(("length", "new_tokens", "restarts"), [(4090, 7, 0), (4090, 8, 1), (4097, 8, 0)])
def test_a_new_start_comes_only_where_cached_short_keys_would_meet_a_long_query(
    generator: TextGenerator, length: int, new_tokens: int, restarts: int
) -> None:
    answer = generator.generate(long_request(generator, length), max_new_tokens=new_tokens)
    assert (len(answer.token_ids), answer.restarts) == (new_tokens, restarts)


def test_a_processor_without_weights_gives_the_same_arrays(generator: TextGenerator, gated_package: Path) -> None:
    hollow = open_processor(open_package(gated_package))
    pictures, clips = REQUESTS["a picture and a clip"]
    prompt = build_prompt("What is said and shown?", num_images=1, num_audios=1)
    ours = hollow(prompt.text, pictures, clips).arrays
    for name, expected in request_for(generator, "a picture and a clip").arrays.items():
        np.testing.assert_array_equal(ours[name], expected)


def test_a_clip_that_needs_no_change_gives_what_the_file_itself_gives(generator: TextGenerator) -> None:
    text = "<|user|>\n<|audio_1|>\n<|end|>\n<|assistant|>\n"
    screened = generator.processor(text, [], [clip(1.0)]).arrays["audio_embeds"]
    model = og.Model(str(generator.package.path)).create_multimodal_processor()
    direct = model(text, audios=og.Audios.open_bytes(sound_bytes(1.0)))
    np.testing.assert_array_equal(screened, direct["audio_embeds"].as_numpy())


def test_adapter_files_are_applied_by_our_stepping_with_either_cache(
    generator: TextGenerator, adapters_package: Path
) -> None:
    graphs = FourGraphs(open_package(adapters_package))
    arrays = request_for(generator, "one picture").arrays
    embeds = graphs.embedding(arrays["input_ids"], *graphs.features(arrays))
    mask = np.ones(embeds.shape[:2], np.int64)
    bare, vision, speech = (graphs.decoder(embeds, mask, role=role)[0] for role in (None, Role.VISION, Role.SPEECH))
    cache = graphs.shared_cache(embeds.shape[1])
    shared = graphs.decoder_shared(embeds, mask, cache, role=Role.VISION)
    assert np.abs(vision - bare).max() > 0.1
    assert np.abs(speech - vision).max() > 0.1
    np.testing.assert_allclose(shared, vision, atol=1e-4)


def test_a_package_for_cuda_agrees_on_the_cpu(cuda_package: Path) -> None:
    package = open_package(cuda_package)
    generator, graphs = TextGenerator(package, provider=Provider.CPU), FourGraphs(package)
    request = request_for(generator, "a picture and a clip")
    answer = generator.generate(request, max_new_tokens=STEPS)
    assert list(answer.token_ids) == graphs.greedy(request.arrays, STEPS, share_cache=True)
