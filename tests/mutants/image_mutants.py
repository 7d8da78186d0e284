"""Planted bugs of images: their ids, positions, features, and the process that reads them."""

from __future__ import annotations

from backend.api import images as image_ids
from backend.images import process as image_process
from backend.images.reader import ImageReader
from backend.models.decoder import Decoder
from backend.worker import prompt_inputs
from backend.worker.image_features import ImageFeatures
from backend.worker.native_tier import NativeTier
from tests.mutants.changes import change, change_everywhere

_FAMILY = "tests/images/test_families.py::test_a_family_answers_as_in_transformers_and_after_evictions"
_SHARED = ["tests/images/test_families.py::test_two_images_share_no_kv_and_the_same_image_does"]
_READER = ["tests/images/test_reader.py"]
_FEATURES = ["tests/images/test_features.py"]

MUTANTS = {
    "all_images_have_the_same_ids": (
        change_everywhere(image_ids.content_ids, ("bytes.fromhex(digest)", "bytes(32)")),
        _SHARED,
    ),
    "text_goes_on_behind_the_rows_of_an_image": (
        change_everywhere(prompt_inputs.rope_positions, ("position + max(rows, columns)", "position + rows")),
        [_FAMILY + "[qwen3_vl]"],
    ),
    "pairs_are_rotated_by_the_frame_alone": (
        change(
            prompt_inputs.PromptInputs, "_tables_of", ("self._axes.to(axes.device)", "self._axes.to(axes.device) * 0")
        ),
        [_FAMILY + "[qwen2_vl]"],
    ),
    "the_first_layer_adds_nothing": (
        change(NativeTier, "_given", ("addresses[1:]", "addresses[2:]")),
        [_FAMILY + "[qwen3_vl]"],
    ),
    "layers_add_what_the_next_one_should": (
        change(Decoder, "forward", ("added[index - 1]", "added[index % len(added)]")),
        [_FAMILY + "[qwen3_vl]"],
    ),
    "pixels_are_not_looked_at_before_they_are_decoded": (
        change_everywhere(image_process.decoded, ("0 < width * height <= max_pixels", "True")),
        _READER,
    ),
    "one_image_may_fill_two_places": (
        change(ImageReader, "place", ("ids.count(places[0]) != len(read)", "False")),
        _READER,
    ),
    "features_of_live_requests_are_let_go": (
        change(ImageFeatures, "_evict", ("if not held.users", "if True")),
        _FEATURES,
    ),
    "any_number_of_features_is_taken": (
        change(ImageFeatures, "begin", ("in_use + needed > self.capacity", "False")),
        _FEATURES,
    ),
}
