"""`--model PATH_OR_HUB_ID` becomes a directory that the engine can read, before any process is started."""

from __future__ import annotations

import re
from pathlib import Path

from backend.api.model_files import shown
from deploy import ROOT
from deploy.errors import UserError

DEFAULT_MODEL = ROOT / "models" / "default"
# What the hub allows as a name: no "..", no "--", no dot or dash at an end, at most 96 characters.
HUB_ID = re.compile(r"(?!.*(\.\.|--))(?=.{3,96}\Z)\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt")


def resolve_model(name: str) -> Path:
    """The checkpoint directory for a path or a hub id (which is downloaded once, into the usual cache).

    Empty = the default model. Raises UserError when there is no such directory, no checkpoint in it, or no network.
    """
    if not name:
        return _check_directory(
            DEFAULT_MODEL, "the default model is missing from this checkout; give one with --model PATH_OR_HUB_ID"
        )
    path = _existing(name)
    if path is not None and not path.is_dir():
        raise UserError(
            f"--model {shown(name)} is no directory; give the directory that holds config.json and *.safetensors"
        )
    if path is not None:
        return _check_directory(
            path, f"--model {shown(name)} is no checkpoint; a directory with config.json and *.safetensors is needed"
        )
    if HUB_ID.fullmatch(name):
        return _download(name)
    raise UserError(
        f"--model {shown(name)}: there is no such directory, and a hub id looks like owner/name; give one of them"
    )


def _existing(name: str) -> Path | None:
    """What the name means on this machine, None when there is nothing. Raises UserError when that cannot be found out."""
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


def _check_directory(path: Path, message: str) -> Path:
    try:
        is_checkpoint = (path / "config.json").is_file() and any(path.glob("*.safetensors"))
    except OSError as error:
        raise UserError(f"{message} ({error.strerror})") from None
    if not is_checkpoint:
        raise UserError(message)
    return path.resolve()


def _download(hub_id: str) -> Path:
    """Fetch the files that are used: configuration, safetensors, tokenizer; never code and never pickles."""
    from huggingface_hub import snapshot_download  # This import is slow, and few starts need it.
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return _check_directory(
            Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES))),
            f"--model {hub_id}: the hub has no safetensors checkpoint of it; choose a model that has one",
        )
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
