"""Families that read images, against transformers in float32: from the picture's file to log-probabilities; and evictions."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from PIL import Image

from backend.api import EngineConfig, InvalidRequest, OutputConfig, Request, SamplingConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.api.image_limits import ImageLimits, check_images
from backend.api.images import ImageInput
from backend.engine.core import EngineCore
from backend.images.reader import ImageReader
from backend.text.tokenizer import Tokenizer
from backend.worker.group import InProcessWorkerGroup
from tests.images.conftest import picture
from tests.images.models import TINY, TOKEN, Made, place_of

NUM_TOKENS = 8
SIZES = ((60, 44), (33, 70))


class Answer(NamedTuple):
    ids: list[int]
    log_probs: list[float]
    num_cached: int


def core_of(path: Path, kernels: str = "native", **model: Any) -> EngineCore:
    kv = KvCacheConfig(max_tokens=4096)
    scheduler = SchedulerConfig(max_batch_size=4, max_num_tokens=256, max_chunk_tokens=48)
    section = ModelConfigSection(path=str(path), dtype="float32", device="cpu", kernels=kernels, **model)
    return EngineCore(EngineConfig(section, kv, scheduler), InProcessWorkerGroup(section, scheduler, kv))


def ask(core: EngineCore, *requests: Request) -> list[Answer]:
    """Run requests at the same time."""
    core.begin_poll()
    found = {number: Answer([], [], 0) for number in range(1, len(requests) + 1)}
    for number, request in enumerate(requests, 1):
        core.enqueue(number, request)
    until = time.monotonic() + 60
    while core.num_live and time.monotonic() < until:
        core.admit()
        for response in core.step():
            assert not response.has_error(), response.error_msg
            answer, result = found[response.request_id], response.result
            answer.ids.extend(result.output_token_ids[0])
            answer.log_probs.extend((result.log_probs or [[]])[0])
            if result.perf_metrics is not None:
                found[response.request_id] = answer._replace(num_cached=result.perf_metrics.num_cached_tokens)
    assert not core.num_live, "the requests do not end"
    return list(found.values())


def request_of(ids: list[int], images: tuple[ImageInput, ...]) -> Request:
    output = OutputConfig(exclude_input_from_output=True, return_log_probs=True, return_perf_metrics=True)
    greedy = SamplingConfig(top_k=1)
    return Request(ids, NUM_TOKENS, sampling_config=greedy, output_config=output, cache_salt="me", images=images)


def prompt_of(reader: ImageReader, tokenizer: Tokenizer, name: str, files: list[bytes]) -> Request:
    text = "".join(f"def f{index}(x):\n {place_of(name)} return" for index, _ in enumerate(files)) + " x + 1\n" * 3
    placed = reader.place(tokenizer.encode(text, add_special_tokens=False), files, TOKEN, tokenizer)
    return request_of(placed.ids, placed.images)


def oracle(model: Any, path: Path, ids: list[int], files: list[bytes]) -> tuple[list[int], list[float]]:
    """transformers: its image processor as it is used, and the whole model."""
    options = {"patch_size": 8} if "mistral3" in path.name else {}
    images = [Image.open(io.BytesIO(data)) for data in files]
    processor = transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
    inputs = dict(processor(images=[images] if "smolvlm" in path.name else images, return_tensors="pt", **options))
    for name in ("num_patches", "num_crops"):
        inputs.pop(name, None)
    log_probs: list[float] = []
    start = len(ids)
    for _ in range(NUM_TOKENS):
        given = torch.tensor([ids])
        name = {"q": "mm_token_type_ids", "g": "token_type_ids"}.get(path.name[0])
        kinds = {name: (given == TOKEN).long()} if name else {}
        with torch.inference_mode():
            logits = model(input_ids=given, use_cache=False, **inputs, **kinds).logits[0, -1].log_softmax(-1)
        ids = [*ids, int(logits.argmax())]
        log_probs.append(float(logits.max()))
    return ids[start:], log_probs


@pytest.mark.parametrize("name", TINY)
def test_a_family_answers_as_in_transformers_and_after_evictions(
    name: str, made: Made, reader: Callable[[str], ImageReader]
) -> None:
    path, files = made(name), [picture(index, size=size) for index, size in enumerate(SIZES)]
    tokenizer = Tokenizer.from_directory(str(path))
    # LLaVA-OneVision's processor does not tile one of several images, which here are read one by one.
    prompts = [files[:1], files[1:]] if name == "llava_onevision" else [files, files[1:]]
    requests = [prompt_of(reader(name), tokenizer, name, each) for each in prompts]
    wanted = [(*oracle_of(name, path, request, each),) for request, each in zip(requests, prompts)]
    for kernels in ("native", "torch"):
        core = core_of(path, kernels)
        try:
            for (ids, log_probs), answer in zip(wanted, first := ask(core, *requests)):
                assert answer.ids == ids
                assert max(abs(a - b) for a, b in zip(log_probs, answer.log_probs, strict=True)) < 1e-4
            again = ask(core, requests[0])[0]
            assert again.ids == first[0].ids and again.num_cached > 0
            core.kv.lose_everything()
            evicted = ask(core, requests[0])[0]
            assert evicted.num_cached == 0 and evicted.ids == first[0].ids
            if kernels == "native":
                assert again.log_probs == evicted.log_probs == first[0].log_probs
        finally:
            core.workers.shutdown()


def oracle_of(name: str, path: Path, request: Request, files: list[bytes]) -> tuple[list[int], list[float]]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    return oracle(model, path, request.input_token_ids, files)


@pytest.mark.parametrize("name", ["qwen3_vl", "smolvlm", "gemma3"])
@pytest.mark.parametrize("quantization", ["w8a8", "none"])
def test_images_do_not_change_a_bit_by_what_runs_beside_them(
    name: str, quantization: str, made: Made, reader: Callable[[str], ImageReader]
) -> None:
    path, tokenizer = made(name), Tokenizer.from_directory(str(made(name)))
    alone = prompt_of(reader(name), tokenizer, name, [picture(3), picture(4)])
    others = [prompt_of(reader(name), tokenizer, name, [picture(seed)]) for seed in (5, 3)]
    text = request_of(tokenizer.encode("import numpy as np\n" * 9, add_special_tokens=False), ())
    core = core_of(path, quantization=quantization)
    try:
        first = ask(core, alone)[0]
        core.kv.lose_everything()
        beside = ask(core, others[0], text, alone, others[1])[2]
        assert (beside.ids, beside.log_probs) == (first.ids, first.log_probs)
    finally:
        core.workers.shutdown()


def test_two_images_share_no_kv_and_the_same_image_does(made: Made, reader: Callable[[str], ImageReader]) -> None:
    path, tokenizer = made("qwen3_vl"), Tokenizer.from_directory(str(made("qwen3_vl")))
    one, same, other = (
        prompt_of(reader("qwen3_vl"), tokenizer, "qwen3_vl", [picture(seed, size=(64, 64))]) for seed in (1, 1, 2)
    )
    assert one.input_token_ids == other.input_token_ids
    core = core_of(path)
    try:
        first = ask(core, one)[0]
        ahead = one.input_token_ids.index(TOKEN)
        different = ask(core, other)[0]
        assert different.num_cached <= ahead and different.ids != first.ids
        shared = ask(core, same)[0]
        assert shared.num_cached == len(one.input_token_ids) - 1 and shared.ids == first.ids
    finally:
        core.workers.shutdown()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(prompt_log_probs=1), "log-probabilities and logits of a prompt with images cannot be had"),
        (dict(return_context_logits=True), "log-probabilities and logits of a prompt with images cannot be had"),
        (dict(), "an image has 16 tokens, which must be computed in one step, and a step has 12 beside a full batch"),
    ],
)
def test_an_image_that_is_seen_as_a_whole_fits_into_a_step(fields: dict[str, Any], message: str) -> None:
    image = ImageInput(TOKEN, 16, "00" * 32, {})
    request = Request([TOKEN] * 16, 4, images=(image,), output_config=OutputConfig(**fields))
    with pytest.raises(InvalidRequest, match=message):
        check_images(request, ImageLimits(TOKEN, step_tokens=12 if not fields else 99))
    check_images(Request([TOKEN] * 16, 4, images=(image,)), ImageLimits(TOKEN, step_tokens=16))
