"""`--model PATH_OR_HUB_ID` becomes a directory that the engine can read, before any process is started."""

from __future__ import annotations

import re
from pathlib import Path

from deploy import ROOT
from deploy.errors import UserError

DEFAULT_MODEL = ROOT / "models" / "default"
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt")


def resolve_model(name: str) -> Path:
    """The checkpoint directory for a path or a hub id (which is downloaded once, into the usual cache).

    Empty = the default model. Raises UserError when there is no such directory, no checkpoint in it, or no network.
    """
    if not name:
        return _check_directory(
            DEFAULT_MODEL, "the default model is missing from this checkout; give one with --model PATH_OR_HUB_ID"
        )
    path = Path(name).expanduser()
    if path.exists():
        return _check_directory(
            path, f"{name} is no checkpoint; a directory with config.json and *.safetensors is needed"
        )
    if HUB_ID.match(name) and not name.startswith("."):
        return _download(name)
    raise UserError(f"--model {name}: there is no such directory, and a hub id looks like owner/name")


def _check_directory(path: Path, message: str) -> Path:
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise UserError(message)
    return path.resolve()


def _download(hub_id: str) -> Path:
    """Fetch the files that are used: configuration, safetensors, tokenizer; never code and never pickles."""
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

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
    except (LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"--model {hub_id} is not in the local cache and cannot be downloaded ({type(error).__name__}); "
            "connect to a network, or give the path of a local checkpoint directory"
        ) from None
