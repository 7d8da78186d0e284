"""The hand-made GGUF file is one that both readers take, and what is left of it after random damage crashes neither."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from backend.api.checkpoint.gguf import MAX_HEADER_BYTES, gguf_file, read_header
from backend.api.errors import ConfigError
from backend.models.loader import resolve_model_path
from tests.model.hostile import ggufs
from tests.model.hostile.readers import outcome, read

SOUND = ggufs.sound().content()
HEADER = SOUND.index(b"blk.0.ffn_down.weight") + 60  # about where the data begins


@pytest.mark.parametrize("reader", ["engine", "text"])
def test_the_sound_file_is_taken_by_its_path_and_by_its_directory(tmp_path: Path, reader: str) -> None:
    ggufs.raw(lambda content: content)(tmp_path)
    read(reader, tmp_path)
    read(reader, tmp_path / ggufs.NAME)
    assert gguf_file(tmp_path) == tmp_path / ggufs.NAME


def test_a_file_needs_no_suffix(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(SOUND)
    assert resolve_model_path(str(tmp_path / "blob")) == tmp_path / "blob"


def test_a_directory_with_a_config_is_a_checkpoint_whatever_else_lies_there(tmp_path: Path) -> None:
    ggufs.raw(lambda content: content)(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert gguf_file(tmp_path) is None


@pytest.mark.parametrize("seed", range(200))
def test_random_damage_ends_in_one_sentence_or_is_taken(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    content = bytearray(SOUND)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(HEADER)
        content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256), content[at] ^ 1 << rng.randrange(8)])
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    (tmp_path / ggufs.NAME).write_bytes(content)
    for reader in ("engine", "text"):
        result = outcome(reader, tmp_path)
        assert result.fault in (None, "was loaded"), f"{result.fault}: {result.error!r}"


def test_a_header_has_a_limit_however_large_the_file_is(tmp_path: Path) -> None:
    """Texts of a MiB each until there are more than the limit; the file is sparse."""
    made = ggufs.sound()
    count = (MAX_HEADER_BYTES >> 20) + 1
    for index in range(count):
        made.settings[f"a{index}"] = (ggufs.TEXT, "x" * (1 << 20))
    (tmp_path / ggufs.NAME).write_bytes(made.content())
    with pytest.raises(ConfigError, match=f"goes beyond the {MAX_HEADER_BYTES} bytes of a header"):
        read_header(tmp_path / ggufs.NAME)
