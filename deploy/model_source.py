"""`--model PATH_OR_HUB_ID` becomes a directory or a GGUF file that the engine can read, before any process is started."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from backend.api.checkpoint.gguf import gguf_file, read_header
from backend.api.checkpoint.gguf_parts import SUFFIX, model_name, title
from backend.api.checkpoint.hub import fetch
from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError
from deploy import ROOT
from deploy.errors import UserError

DEFAULT_MODEL = ROOT / "models" / "default"
# Names that the hub allows: no "..", no "--", no dot or dash at an end, at most 96 characters. Then a quantisation may follow.
HUB_ID = re.compile(
    r"(?!.*(\.\.|--))(?=[^:]{3,96}(:|\Z))\w([\w.-]*\w)?/\w([\w.-]*\w)?(:(?=.{1,96}\Z)\w([\w.-]*\w)?)?", re.ASCII
)


def names_of(given: str) -> Iterator[str]:
    """The names of the model of `--model GIVEN` for clients: its own first, then `everbatch`, then those it is started by."""
    path = Path(given)
    if path.is_dir():
        name = path.resolve().name
    else:
        name = model_name(path.name) if path.is_file() else given.partition(":")[0].rpartition("/")[2]
    yield from (title(name), "everbatch", name, given) if given else ("everbatch",)


def resolve_model(name: str) -> Path:
    """The checkpoint directory or GGUF file for a path or a hub id (which is downloaded once, into the usual cache).

    A directory that holds one GGUF file and no config.json stands for that file. Empty = the default model. Raises UserError
    when there is no such directory, no checkpoint in it, or no network.
    """
    if not name:
        return _check_directory(
            DEFAULT_MODEL, "the default model is missing from this checkout; give one with --model PATH_OR_HUB_ID"
        )
    path = _existing(name)
    if path is not None and (file := _gguf(name, path)) is not None:
        return file
    if path is not None and not path.is_dir():
        raise UserError(
            f"--model {shown(name)} is no directory and no GGUF file; give the directory that holds config.json and "
            "*.safetensors, or a GGUF file"
        )
    if path is not None:
        return _check_directory(
            path, f"--model {shown(name)} is no checkpoint; a directory with config.json and *.safetensors is needed"
        )
    if name.endswith(SUFFIX):
        raise UserError(f"--model {shown(name)}: there is no such file; give the path of a GGUF file")
    if HUB_ID.fullmatch(name):
        return _download(name)
    raise UserError(
        f"--model {shown(name)}: there is no such directory, and a hub id looks like owner/name; give one of them"
    )


def _existing(name: str) -> Path | None:
    """The checkpoint on this machine that a name stands for; None: there is none. Raises UserError if it cannot be looked up."""
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, UnicodeError):  # The name holds a zero byte, or something else that no file can be called.
        raise UserError(
            f"--model {shown(name)}: no directory can have this name; give the path of a directory"
        ) from None
    except RuntimeError:  # expanduser() knows no such user.
        raise UserError(f"--model {shown(name)}: there is no such user; give the path of a directory") from None
    except OSError as error:
        raise UserError(
            f"--model {shown(name)}: cannot be looked up ({error.strerror}); give the path of a directory"
        ) from None
    return path


def _gguf(name: str, path: Path) -> Path | None:
    """The GGUF file that a path stands for, absolute, but a link of a hub's cache keeps its name. Raises UserError."""
    try:
        file = gguf_file(path)
        if file is not None:
            read_header(file)
    except ConfigError as error:
        raise UserError(f"--model {shown(name)}: {error}") from None
    return None if file is None else file.absolute()


def _check_directory(path: Path, message: str) -> Path:
    try:
        is_checkpoint = (path / "config.json").is_file() and any(path.glob("*.safetensors"))
    except OSError as error:
        raise UserError(f"{message} ({error.strerror})") from None
    if not is_checkpoint:
        raise UserError(f"{message}{_what_lacks(path)}")
    return path.resolve()


def _what_lacks(path: Path) -> str:
    """The rest of a sentence about a directory that is no checkpoint."""
    if (path / "params.json").is_file():
        return ": it has Meta's files; make one of them with ./everbatch convert DIRECTORY --output ANOTHER"
    if not (path / "config.json").is_file():
        return ": it has no config.json"
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        return (
            ": its weights are pickle files (.bin, .pt), which can run code and are not read; make safetensors of them "
            "with ./everbatch convert DIRECTORY --output ANOTHER"
        )
    return ": it has no *.safetensors"


def _download(hub_id: str) -> Path:
    """The checkpoint directory or the GGUF file of a hub id. Raises UserError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = fetch(hub_id)
    except ConfigError as error:
        raise UserError(f"--model {error}") from None
    except HfHubHTTPError as error:
        reason = (
            "no such model, or it is not public" if error.response.status_code in (401, 403, 404) else "the hub refused"
        )
        raise UserError(f"--model {hub_id}: {reason}; give the path of a local checkpoint directory instead") from None
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise UserError(
            f"--model {hub_id} is not in the local cache and cannot be downloaded ({type(error).__name__}); "
            "connect to a network, or give the path of a local checkpoint directory"
        ) from None
    if (file := _gguf(hub_id, found)) is not None:
        return file
    return _check_directory(
        found,
        f"--model {hub_id}: the hub has neither a safetensors checkpoint nor a GGUF file of it; choose another model",
    )
