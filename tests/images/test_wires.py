"""Images of TensorRT-LLM's and vLLM's Triton models: each form gives the request that the file itself gives."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from backend.api import EngineConfig, InvalidRequest, Request, Unsupported
from backend.api.config.schema import ImagesConfig
from backend.core.step import ModelInfo
from backend.images.reader import ImageReader
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.llmapi import LLMAPI
from backend.serving.wires.trtllm_text import BLS, ENSEMBLE
from backend.serving.wires.vllm import VLLM
from tests.images.conftest import picture
from tests.images.models import TOKEN, VOCAB, Made, place_of
from tests.serving.fake_triton import Tensor

PLACE = place_of("qwen3_vl")
Asked = Callable[..., Request]
CONFIG = EngineConfig(images=ImagesConfig(max_images=2, max_bytes=30_000))


@pytest.fixture
def asked(made: Made, reader: Callable[[str], ImageReader]) -> Asked:
    tools = TextTools.from_directory(str(made("qwen3_vl")))._replace(images=reader("qwen3_vl"))

    def parse(
        front: TextFront, *places: bytes, text: str | None = None, token_id: int = TOKEN, **inputs: Any
    ) -> Request:
        """The request of a prompt with a place for each of the images, which `inputs` bring."""
        prompt = PLACE * len(places) + "x" if text is None else text
        arrays = {"text_input": np.array([prompt.encode()], dtype=object), **inputs}
        if front.tensors.batched:
            arrays = {name: array[None] for name, array in {**arrays, "max_tokens": np.array([4], np.int32)}.items()}
        batch = Batch.read(front.tensors, [Tensor(*item) for item in arrays.items()], 64)
        context = ServingContext(CONFIG, ModelInfo("m", VOCAB, 512, eos_ids=(3,), image_token_id=token_id))
        front.check(batch, context)
        (work,) = front.parse(batch, context, Parameters(), tools)
        assert isinstance(work.request, Request)
        wanted = (
            reader("qwen3_vl").place(tools.tokenizer.encode(prompt), places, TOKEN, tools.tokenizer) if places else None
        )
        if wanted is not None:
            assert (work.request.input_token_ids, work.request.images) == (wanted.ids, wanted.images)
        return work.request

    return parse


def texts(*values: str) -> np.ndarray:
    return np.array([value.encode() for value in values], dtype=object)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64_of(data)}"


def pixels(*files: bytes) -> np.ndarray:
    return np.stack([np.asarray(Image.open(io.BytesIO(data))) for data in files])


ONE, OTHER = picture(0, size=(61, 45)), picture(1, size=(61, 45))


@pytest.mark.feature("W-01", "W-07", "W-10")
def test_each_form_gives_the_request_that_the_file_gives(asked: Asked) -> None:
    for front, name in ((ENSEMBLE, "image_url_input"), (BLS, "image_url_input"), (LLMAPI, "image_url")):
        asked(front, ONE, **{name: texts(url(ONE))})
        asked(front, OTHER, ONE, **{name: texts(url(OTHER), "", url(ONE))[[0, 2]]})
    asked(VLLM, ONE, OTHER, image=texts(base64_of(ONE), base64_of(OTHER)))
    for front in (ENSEMBLE, BLS):
        request = asked(front, text=PLACE * 2, image_bytes_input=pixels(ONE, OTHER))
        same = asked(front, text=PLACE * 2, image_url_input=texts(url(ONE), url(OTHER)))
        assert request.images == same.images and request.input_token_ids == same.input_token_ids


@pytest.mark.feature("W-01", "W-07", "W-10")
def test_empty_inputs_are_no_images(asked: Asked) -> None:
    empty = np.empty((0, 1, 1, 3), np.uint8)
    for front, inputs in (
        (ENSEMBLE, {"image_url_input": texts(""), "image_bytes_input": empty}),
        (VLLM, {"image": texts("")}),
        (LLMAPI, {"image_url": texts("")}),
    ):
        assert asked(front, text="x", token_id=-1, **inputs).images == ()


@pytest.mark.parametrize(
    ("front", "inputs", "message"),
    [
        (BLS, {"image_url_input": texts("https://example.org/a.png")}, "has 'https://example.org/a.png', .* nothing is fetched"),
        (LLMAPI, {"image_url": texts("file:///etc/passwd")}, "image_url has 'file:///etc/passwd', .* nothing is fetched here"),
        (BLS, {"image_url_input": texts("data:image/png,abc")}, "send a URL data:image/png;base64"),
        (BLS, {"image_url_input": texts("data:;base64,%%%")}, "image 0 is no base64"),
        (BLS, {"image_url_input": texts(url(b"no image"))}, "the image is no file of the types"),
        (BLS, {"image_url_input": texts(*[url(ONE)] * 3)}, "image_url_input holds 3 entries, the limit is 2"),
        (BLS, {"image_url_input": texts("data:;base64," + "A" * 60_000)}, "image 0 has 45000 bytes, the limit is 30000"),
        (BLS, {"image_url_input": texts("A" * 90_000)}, "image_url_input has 90000 bytes, the limit is 80400 .twice images"),
        (BLS, {"image_bytes_input": pixels(ONE)[..., :1]}, r"image_bytes_input has pictures of the shape \[45, 61, 1\]"),
        (BLS, {"image_bytes_input": np.zeros((1, 99, 120, 3), np.uint8)}, "image 0 has 35694 bytes, the limit is 30000"),
        (BLS, {"image_bytes_input": np.zeros((3, 1, 1, 3), np.uint8)}, "the request has 3 images, the limit is 2"),
        (BLS, {"image_bytes_input": pixels(ONE), "image_url_input": texts(url(ONE))}, "both have images"),
        (VLLM, {"image": texts("%%%")}, "image 0 is no base64"),
        (VLLM, {"image": texts(base64_of(ONE), base64_of(ONE))}, "has 1 places for images .* has 2 images"),
        (VLLM, {"image": texts(base64_of(ONE)), "text": PLACE + "x y " * 240}, "the prompt has .* the limit is 511"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(asked: Asked, front: TextFront, inputs: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        asked(front, **{"text": PLACE, **inputs})


def test_a_model_of_text_refuses_images(asked: Asked) -> None:
    for front, inputs in (
        (ENSEMBLE, {"image_url_input": texts(url(ONE))}),
        (ENSEMBLE, {"image_bytes_input": pixels(ONE)}),
        (VLLM, {"image": texts(base64_of(ONE))}),
    ):
        with pytest.raises(Unsupported, match="the model reads text only"):
            asked(front, text=PLACE, token_id=-1, **inputs)
