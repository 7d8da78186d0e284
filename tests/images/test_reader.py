"""Pictures of all forms, whole and broken, through the process that reads them: each gives an image or one sentence."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from backend.api.config.schema import ImagesConfig
from backend.api.errors import EverbatchError, InvalidRequest, Unsupported
from backend.api.images import FIRST_ID, content_ids, packed_ids
from backend.core.limited_messages import Limits
from backend.images.process import decoded
from backend.images.reader import ImageReader, ReadImage
from backend.text.tokenizer import Tokenizer
from tests.images.conftest import picture
from tests.images.models import TOKEN, Made, place_of

Readers = Callable[[str], ImageReader]
MOST = 1 << 20


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA", "LA", "P", "1"])
def test_every_form_is_read_as_rgb(format: str, mode: str) -> None:
    try:
        data = picture(1, format, mode)
    except (OSError, ValueError):
        pytest.skip("the format has no such mode")
    image = decoded(data, MOST)
    assert image.mode == "RGB" and image.size == (60, 44)


def test_alpha_is_laid_over_white() -> None:
    image = decoded(saved(Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "PNG"), MOST)
    assert image.getpixel((1, 1)) == (255, 255, 255)


def test_sixteen_bits_become_eight() -> None:
    values = np.array([[0, 257 * 100, 257 * 255]], dtype=np.uint16)
    image = decoded(saved(Image.fromarray(values), "PNG"), MOST)
    assert [image.getpixel((x, 0))[0] for x in range(3)] == [0, 100, 255]


def test_a_picture_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter to the right
    assert decoded(saved(Image.new("RGB", (40, 20)), "JPEG", exif=exif), MOST).size == (20, 40)


def test_too_many_pixels_are_refused_before_they_are_decoded() -> None:
    bomb = saved(Image.new("L", (6_000, 6_000)), "PNG")
    assert len(bomb) < MOST
    with pytest.raises(InvalidRequest, match="6000 x 6000 pixels, the limit is 1048576 in all .images.max_pixels"):
        decoded(bomb, MOST)


def test_several_frames_are_refused() -> None:
    frames = [Image.new("RGB", (9, 9), (shade, 0, 0)) for shade in (0, 100, 200)]
    for format in ("GIF", "WEBP", "PNG", "TIFF"):
        data = saved(frames[0], format, save_all=True, append_images=frames[1:])
        with pytest.raises(InvalidRequest, match="has several frames"):
            decoded(data, MOST)


def test_broken_files_give_a_sentence_each_and_the_process_lives(reader: Readers) -> None:
    rng, read = np.random.default_rng(0), reader("qwen3_vl")
    cases = [
        b"",
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"\0" * 1000,
    ]
    for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = picture(1, format)
        cases += [whole[: len(whole) * part // 9] for part in range(1, 9)]
        for _ in range(9):
            damaged = bytearray(whole)
            for at in rng.integers(0, len(whole), 12):
                damaged[at] = rng.integers(0, 256)
            cases.append(bytes(damaged))
    assert len(cases) > 100
    refused = 0
    for data in cases:
        try:
            assert read.read(data).inputs
        except InvalidRequest as error:
            assert (
                error.message.startswith(("the image ", "the model's image processor ")) and "\n" not in error.message
            )
            refused += 1
    assert refused > 50
    assert read.read(picture(77)).inputs


def test_time_and_memory_of_an_image_are_limited(made: Made) -> None:
    large = saved(Image.new("RGB", (3000, 3000)), "PNG")
    for limits, what in ((Limits(0.01, 1 << 30), "of processor time"), (Limits(10.0, 8 << 20), "bytes of memory")):
        read = ImageReader(str(made("qwen3_vl")), ImagesConfig(), limits)
        try:
            with pytest.raises(InvalidRequest, match=what):
                read.read(large)
        finally:
            read.close()


def test_a_checkpoint_without_a_processor_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    read = ImageReader(str(tmp_path_factory.mktemp("none")), ImagesConfig())
    try:
        with pytest.raises(Unsupported, match="the image processor cannot be loaded"):
            read.read(picture())
    finally:
        read.close()


@pytest.mark.parametrize("name", ["smolvlm", "qwen3_vl"])  # test_families.py has all
def test_a_placeholder_becomes_the_tokens_of_its_image(name: str, made: Made, reader: Readers) -> None:
    tokenizer = Tokenizer.from_directory(str(made(name)))
    ids = tokenizer.encode(f"a{place_of(name)}b", add_special_tokens=False)
    placed = reader(name).place(ids, [picture()], TOKEN, tokenizer)
    (image,) = placed.images
    assert placed.ids.count(TOKEN) == image.num_tokens > 1 and image.inputs["pixel_values"].dtype == "uint8"
    for files, found in (([], None), ([picture(), picture(1)], "has 1 places for images .* has 2 images")):
        if found is not None:
            with pytest.raises(EverbatchError, match=found):
                reader(name).place(ids, files, TOKEN, tokenizer)


@pytest.mark.parametrize("name", ["gemma3", "internvl"])
@pytest.mark.parametrize("text", ["{}b", "a\n{}\n\nb", "a {}{}\n", "{} {}", "\n\n{}"])
def test_white_space_around_images_is_tokenised_with_theirs(name: str, text: str, made: Made, reader: Readers) -> None:
    """As in a prompt that has the text of each image in it, which is what transformers tokenises."""
    tokenizer, place = Tokenizer.from_directory(str(made(name))), place_of(name)
    files = [picture()] * text.count("{}")
    ids = tokenizer.encode(text.replace("{}", place), add_special_tokens=False)
    whole = text.replace("{}", reader(name).read(picture()).text)
    assert reader(name).place(ids, files, TOKEN, tokenizer).ids == tokenizer.encode(whole, add_special_tokens=False)


def test_pixels_of_more_than_a_frame_are_refused(made: Made, monkeypatch: pytest.MonkeyPatch, reader: Readers) -> None:
    monkeypatch.setattr("backend.images.reader.MAX_PIXEL_BYTES", 1000)
    tokenizer = Tokenizer.from_directory(str(made("qwen3_vl")))
    ids = tokenizer.encode(place_of("qwen3_vl"), add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="the limit is 1000 in all; send fewer or smaller ones"):
        reader("qwen3_vl").place(ids, [picture()], TOKEN, tokenizer)


def test_a_file_is_read_once(reader: Readers) -> None:
    first: ReadImage = reader("qwen3_vl").read(picture(5))
    assert reader("qwen3_vl").read(picture(5)) is first


def test_ids_of_images_follow_from_their_content() -> None:
    one, other = content_ids("aa" * 32, 5), content_ids("ab" * 32, 5)
    assert one == content_ids("aa" * 32, 5) and not set(one) & set(other) and len(set(one)) == 5
    assert all(FIRST_ID <= each < 1 << 63 for each in one)
    assert packed_ids([1, 2]).itemsize == 4 and packed_ids([1, one[0]]).itemsize == 8
