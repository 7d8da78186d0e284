"""Models of the Hugging Face hub: which files of a repository are fetched, and where they lie then.

ORG/NAME is a checkpoint of safetensors. ORG/NAME:QUANTISATION is the GGUF file, or the parts of one, whose name has that
quantisation; llama.cpp and Ollama read such names in the same way. Where a repository has no safetensors, ORG/NAME is its only
GGUF model, or the first of the quantisations USUAL that it has.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from backend.api.checkpoint.gguf_parts import SUFFIX, model_name
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError

CHECKPOINT = (
    "*.json",
    "*.safetensors",
    "*.model",
    "*.jinja",
    "*.txt",
)  # never code, pickles, or every GGUF file of many
USUAL = ("Q4_K_M", "Q8_0")  # the first that there is
MAX_LISTED = 20
_NO_MODELS = re.compile(r"mmproj|imatrix|(mtp|eagle3|dflash|dspark)-")  # llama.cpp's files that go beside a model
_QUANTISATION = re.compile(r"[-.]((?:UD-)?[A-Z0-9_]+)\Z", re.IGNORECASE)


class Listing(NamedTuple):
    names: list[str]
    is_cached: bool  # True: the local cache has them, and the hub cannot be reached


def fetch(hub_id: str) -> Path:
    """Download the files of a model that the local cache lacks. Returns the checkpoint's directory there, or the GGUF file.

    Raises ConfigError, whose message begins with the id, where the repository has no such file; and what huggingface_hub's
    snapshot_download raises where the model is neither there nor can be fetched.
    """
    from huggingface_hub import snapshot_download  # This import is slow, and few starts need it.

    repository, _, quantisation = hub_id.partition(":")
    listing = _listing(repository)
    wanted = gguf_files(repository, quantisation, listing.names)
    patterns = [glob.escape(name) for name in wanted] or list(CHECKPOINT)
    directory = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=listing.is_cached))
    return directory / wanted[0] if wanted else directory


def gguf_files(repository: str, quantisation: str, names: Iterable[str]) -> list[str]:
    """The files of one GGUF model among those of a repository, in order; none for a checkpoint of safetensors.

    Raises ConfigError where none or several models are of that quantisation.
    """
    files = sorted(names)
    if not quantisation and any(name.endswith(".safetensors") for name in files):
        return []
    models: dict[str, list[str]] = {}
    for name in filter(_is_model, files):
        models.setdefault(model_name(name), []).append(name)
    if not models:
        if quantisation:
            raise ConfigError(f"{repository} has no GGUF file; leave out :{shown(quantisation)}, or use another model")
        return []
    for each in [quantisation] if quantisation else USUAL:
        found = _of_quantisation(models, each)
        if len(found) > 1:
            raise ConfigError(f"{repository} has {len(found)} models of {each}; {_one_of(map(_stem, found))}")
        if found:
            return models[found[0]]
    if len(models) == 1 and not quantisation:
        return next(iter(models.values()))
    wanted = shown(quantisation or " or ".join(USUAL))
    raise ConfigError(f"{repository} has no GGUF file of {wanted}; {_one_of(_quantisations(models))}")


def _listing(repository: str) -> Listing:
    """The names of the repository's files on the hub; where it cannot be asked, in the local cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Listing(HfApi().list_repo_files(repository), is_cached=False)
    except HFValidationError:
        raise
    except Exception as error:  # When the net is down, its HTTP library raises errors of its own.
        unreached = error
    try:
        directory = Path(snapshot_download(repository, allow_patterns=[], local_files_only=True))
    except LocalEntryNotFoundError:
        raise (
            unreached if isinstance(unreached, HfHubHTTPError) else LocalEntryNotFoundError(str(unreached))
        ) from None
    found = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    return Listing(found, is_cached=True)


def _is_model(name: str) -> bool:
    is_within = name.isprintable() and not name.startswith("/") and ".." not in name.split("/")
    return is_within and name.endswith(SUFFIX) and _NO_MODELS.search(_stem(name)) is None


def _of_quantisation(models: Iterable[str], quantisation: str) -> list[str]:
    """The models that are called so; else those whose name, or a folder that they lie in, ends in it; else those that hold it."""
    word = re.escape(quantisation)
    for pattern in (rf".*/{word}", rf".*[-./]{word}(/.*)?", rf".*[-./]{word}[-./].*"):
        if found := [model for model in models if re.fullmatch(pattern, f"/{model}", re.IGNORECASE)]:
            return found
    return []


def _stem(model: str) -> str:
    return model.rpartition("/")[2]


def _quantisations(models: Iterable[str]) -> list[str]:
    """The quantisation of each model, or its name where that says none: each can stand behind the colon."""
    named = [_stem(model) for model in models]
    return list(dict.fromkeys(found[1] if (found := _QUANTISATION.search(name)) else name for name in named))


def _one_of(quantisations: Iterable[str]) -> str:
    given = [shown(each) for each in quantisations]
    more = f" or one of {len(given) - MAX_LISTED} more" if len(given) > MAX_LISTED else ""
    return f"put one of these behind the name and a colon: {', '.join(given[:MAX_LISTED])}{more}"
