"""Makes what a worker needs for images: the tower with its thread, and how prompts take features."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from backend.api.checkpoint.model_files import read_object
from backend.api.checkpoint.quantised import FILE
from backend.api.config.schema import ImagesConfig
from backend.api.errors import ConfigError
from backend.models import loader
from backend.models.decoder import Decoder
from backend.worker.image_features import ImageFeatures
from backend.worker.loaded_model import LoadedModel, linear_options
from backend.worker.prompt_inputs import ImageSetting

if TYPE_CHECKING:
    from backend.hosted.checkpoint import HostedCheckpoint

log = logging.getLogger("everbatch.worker")


class ImageParts(NamedTuple):
    """`features` is None where the model takes no images, for the reason `refusal` if it could otherwise."""

    features: ImageFeatures | None = None
    setting: ImageSetting | None = None
    refusal: str = ""

    @property
    def num_bytes(self) -> int:
        """Memory that features may take, which the KV pool leaves them."""
        return 0 if self.features is None else self.features.capacity

    @property
    def are_whole(self) -> bool:
        """True if the tokens of an image must be computed in one step."""
        return self.setting is not None and self.setting.images.sees_whole

    @property
    def token_id(self) -> int:
        """The model's token for images; -1: none are taken."""
        return -1 if self.setting is None else self.setting.images.token_id


def make_images(
    checkpoint: loader.CheckpointReader | HostedCheckpoint, loaded: LoadedModel, path: Path | None, config: ImagesConfig
) -> ImageParts:
    """path: of the checkpoint; None: it is in memory. A tower that cannot be built leaves a server for text, which says why."""
    images = loaded.config.images
    if images is None or path is None or not isinstance(checkpoint, loader.CheckpointReader):
        return ImageParts()
    if not config.max_images:
        return ImageParts(refusal="images.max_images is 0 on this server: send text only")
    if images.sees_whole and (loaded.tier_name not in ("native", "torch") or loaded.device.type != "cpu"):
        return ImageParts(
            refusal=f"images of {loaded.config.architecture} are read on CPUs only in this version: send text only"
        )
    try:
        from backend.hosted.images import build_tower  # imports transformers, which takes seconds

        content = read_object(path, FILE) or {}
        linears = linear_options(loaded.choice, "none", loaded.dtype)
        tower = build_tower(content, loaded.config, checkpoint.tensors, loaded.dtype, loaded.device, linears)
    except (ConfigError, ImportError) as error:
        refusal = f"images are refused: {error}"
        log.warning("%s", refusal)
        return ImageParts(refusal=refusal)
    features, model = ImageFeatures(tower, config.cache_bytes), loaded.model
    assert isinstance(model, Decoder)
    rope = next((rope for rope in loaded.config.ropes if rope.sections), None)
    if rope is None:
        return ImageParts(features, ImageSetting(images, features.of))
    tables = next(each for each in model.rotary if each is not None)
    return ImageParts(features, ImageSetting(images, features.of, rope.axes, tables))
