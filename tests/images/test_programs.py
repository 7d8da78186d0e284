"""Pictures of programs: beside the prompts of an LLM, and in those of LMDeploy's pipeline, over a model that reads them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from backend.api import InvalidRequest
from compat.llm import LLM, NotHere, ParameterError, RequestOutput, SamplingParams
from compat.llm.images import file_of
from compat.lmdeploy import ChatTemplateConfig, GenerationConfig, Pipeline, load_image
from compat.lmdeploy.vl import IMAGE_TOKEN
from tests.images.conftest import picture
from tests.images.models import Made, place_of

ASKED = SamplingParams(max_tokens=4, end_id=-1, return_perf_metrics=True)
PLACE, FILE, OTHER = place_of("qwen3_vl"), picture(0), picture(1)
SHORT = GenerationConfig(max_new_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(made: Made) -> Iterator[LLM]:
    with LLM(made("qwen3_vl"), kv_cache_config={"max_tokens": 4096}) as loaded:
        yield loaded


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def of(output: Any) -> tuple[list[int], list[str], list[int]]:
    """Prompt, content of its images, output."""
    assert isinstance(output, RequestOutput)
    return output.prompt_token_ids, [image.digest for image in output.request.images], output.outputs[0].token_ids


@pytest.mark.feature("003-12", "002-07")
def test_a_picture_is_the_same_in_every_form(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(FILE)
    forms = [FILE, opened(FILE), path, str(path), url(FILE), [memoryview(FILE)]]
    prompts = [{"prompt": PLACE + "x", "multi_modal_data": {"image": form}} for form in forms]
    first, *others = map(of, llm.generate(prompts, ASKED))
    assert all(each == first for each in others) and len(first[0]) > 40
    several = llm.generate({"prompt": PLACE * 2 + "x", "multi_modal_data": {"image": [opened(FILE), OTHER]}}, ASKED)
    assert of(several)[1][0] == first[1][0] != of(several)[1][1]
    for kind, found in (("image_url", {"url": url(FILE)}), ("image_pil", opened(FILE)), ("image_data", {"data": FILE})):
        part = {"type": kind, kind: found}
        (asked,) = llm.chat([[{"role": "user", "content": [part, {"type": "text", "text": "x"}]}]], ASKED)
        assert of(asked)[1] == first[1]


@pytest.mark.feature("002-48", "003-12")
def test_the_same_text_with_another_picture_shares_no_kv(llm: LLM) -> None:
    text = f"{PLACE}{'x y ' * 40}"
    found = []
    for data in (FILE, OTHER, FILE):
        output = llm.generate({"prompt": text, "multi_modal_data": {"image": data}}, ASKED, cache_salt="of this test")
        found.append((of(output)[2], output.outputs[0].request_perf_metrics.num_cached_tokens))
    (first, none), (_, nor), (again, cached) = found
    assert (none, nor) == (0, 1) and cached > 100 and again == first  # the token ahead of the picture is common


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"image": [FILE, FILE]}, InvalidRequest, "1 places for images .* has 2 images"),
        ({"image": "/no/such.png"}, ParameterError, "image 0, '/no/such.png', cannot be read: No such file"),
        ({"image": "https://example.org/a.png"}, InvalidRequest, "nothing is fetched here; give the path"),
        ({"image": 5}, TypeError, "image 0 is a int; give the path of a file, its bytes, or an image of PIL"),
        ({"image": [FILE] * 17}, InvalidRequest, "the request has 17 images, the limit is 16"),
        ({"video": FILE}, NotHere, "multi_modal_data has 'video'"),
        ([FILE], TypeError, "multi_modal_data is a list"),
    ],
)
def test_what_is_no_picture_is_named(llm: LLM, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate({"prompt": PLACE, "multi_modal_data": given}, ASKED)


def test_images_of_pil_keep_their_pixels_and_stand_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter to the right
    turned = io.BytesIO()
    Image.new("RGB", (40, 20), (9, 8, 7)).save(turned, "PNG", exif=exif)
    for given in (opened(turned.getvalue()), load_image(turned.getvalue())):
        seen = opened(file_of(given, 0, 1 << 20))
        assert seen.size == (20, 40) and seen.getpixel((3, 3)) == (9, 8, 7)
    assert opened(file_of(Image.new("CMYK", (4, 4)), 0, 1 << 20)).mode == "RGB"
    assert opened(file_of(Image.new("RGBA", (4, 4)), 0, 1 << 20)).mode == "RGBA"  # laid over white where all are
    with pytest.raises(ParameterError, match="the image cannot be decoded .UnidentifiedImageError."):
        load_image(b"no image")


@pytest.mark.feature("W-03")
def test_a_pipeline_takes_pictures_beside_texts_in_messages_and_in_sessions(llm: LLM) -> None:
    pipe, pil = Pipeline(llm), load_image(url(FILE))
    one = pipe(("x", pil), SHORT)
    both = pipe([("x", [FILE]), ("x", [FILE, pil]), "x"], SHORT)
    assert both[0].token_ids == one.token_ids and one.finish_reason == "length"
    assert both[2].input_token_len < one.input_token_len < both[1].input_token_len
    parts = [{"type": "image_data", "image_data": {"data": pil}}, {"type": "text", "text": "x"}]
    assert pipe([{"role": "user", "content": parts}], SHORT) == one
    assert pipe((f"{IMAGE_TOKEN}x", pil), SHORT) == one  # the template writes the place in front of the text
    assert pipe((PLACE + "x", pil), SHORT, do_preprocess=False).finish_reason == "length"
    plain = Pipeline(llm, ChatTemplateConfig(capability="completion"))
    assert plain((PLACE + "x", FILE), SHORT) == pipe((PLACE + "x", pil), SHORT, do_preprocess=False)
    chat = pipe.chat(("x", pil), gen_config=SHORT)
    again = pipe.chat("y", session=chat, gen_config=SHORT)
    assert again.response.input_token_len > one.input_token_len and chat.history[0][0] == ("x", pil)
    assert pipe(("x", "/no/such.png"), SHORT).finish_reason == "error"
    with pytest.raises(ParameterError, match="has 2 times <IMAGE_TOKEN>, and 1 pictures"):
        pipe((IMAGE_TOKEN * 2, pil), SHORT)
    with pytest.raises(ParameterError, match="the model's own chat template is not used"):
        plain([{"role": "user", "content": parts}], SHORT)
