"""The text that a model is calibrated with, in tokens."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from backend.api.errors import ConfigError
from backend.text.tokenizer import Tokenizer

ROWS, ROW_TOKENS = 16, 512
MIN_TOKENS = 64
# The default model was trained on Python's standard library. None of these files was held out of its training.
BUILT_IN = (
    "argparse.py",
    "asyncio/queues.py",
    "csv.py",
    "email/message.py",
    "heapq.py",
    "inspect.py",
    "json/decoder.py",
    "logging/handlers.py",
    "pathlib.py",
    "shutil.py",
    "socketserver.py",
    "statistics.py",
    "tarfile.py",
    "textwrap.py",
    "unittest/mock.py",
    "zipfile.py",
)


def built_in_texts() -> list[str]:
    """Reads BUILT_IN from the standard library of the running Python. Raises ConfigError if it has no sources."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [(library / name).read_text(encoding="utf-8") for name in BUILT_IN if (library / name).is_file()]
    if not texts:
        raise ConfigError("this Python has no sources of its standard library; name a text with --calibration FILE")
    return texts


def read_text(file: Path) -> str:
    """Reads a calibration text. Raises ConfigError if it cannot be read or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"calibration file {file} cannot be read ({error.strerror}); give a text file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"calibration file {file} is not UTF-8 (byte {error.start}); give a text file in that encoding"
        ) from None


def rows_of(texts: list[str], directory: Path, longest: int) -> Tensor:
    """Up to ROWS pieces of the texts, spread evenly over them, in the model's tokens: int64 [rows, length].

    `longest` is the number of tokens that the model can read. Raises ConfigError if there is too little text.
    """
    tokenizer = Tokenizer.from_directory(directory)
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text)
    if len(ids) < MIN_TOKENS:
        raise ConfigError(
            f"the calibration text has {len(ids)} tokens, at least {MIN_TOKENS} are needed; "
            f"{ROWS * ROW_TOKENS} are used of a longer one"
        )
    length = min(ROW_TOKENS, longest, len(ids))
    count = min(ROWS, len(ids) // length)
    starts = [(len(ids) - length) * row // max(1, count - 1) for row in range(count)]
    return torch.tensor([ids[start : start + length] for start in starts])
