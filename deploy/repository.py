"""Which Triton models a server serves, and the directory from which tritonserver reads them.

A profile is a directory of models: model_repository/ is `trtllm`, the others lie in deploy/profiles/. Several profiles and
repositories of the user's own are served side by side as long as no two models have one name. All models of this project
are clients of one engine, so two are added where they are missing: the one that owns the engine, and `everbatch`, which
this project's own clients speak to.
"""

from __future__ import annotations

import compileall
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from backend.api.config.schema import EngineConfig
from deploy import ROOT
from deploy.errors import UserError
from deploy.rundir import is_plain

DEFAULT_PROFILE = "trtllm"
DEFAULT_REPOSITORY = ROOT / "model_repository"
PROFILES = ROOT / "deploy" / "profiles"
BACKENDS = ROOT / "deploy" / "backends"  # python-based backends of this project: NAME/model.py
ALL = "all"
OWNER = "tensorrt_llm"  # the role of the model that starts the engine
OWNER_ELSEWHERE = "everbatch_engine"  # its name where a profile has another model of its usual name
OWN_WIRE = "everbatch"
UNARY = "_unary"  # behind the name of a model that is served for unary clients besides

_COMMENT = re.compile(r"#.*")
_ROLE = re.compile(r'key\s*:\s*"role"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"([^"]*)"')
_BACKEND = re.compile(r'^backend\s*:\s*"([^"]*)"', re.MULTILINE)
_NAME = re.compile(r'^name\s*:\s*"([^"]*)"', re.MULTILINE)
_TENSORS = re.compile(r"^(?:input|output)\b", re.MULTILINE)
_TENSOR_NAME = re.compile(r'\bname\s*:\s*"([^"]*)"')
_PRESCRIBED = "# prescribed by its protocol"  # see backend/serving/model_config.py
_DECOUPLED = re.compile(r"\bdecoupled\s*:\s*(?:true|false)", re.IGNORECASE)


@dataclass(frozen=True)
class Model:
    """A model's directory, the name under which it is served, and where it comes from, in words."""

    name: str
    directory: Path
    origin: str
    is_unary: bool = False  # whatever `triton.decoupled` says
    parameters: tuple[tuple[str, str], ...] = ()  # added to its configuration

    @cached_property
    def configuration(self) -> str:
        """The text of config.pbtxt without its comments."""
        return _COMMENT.sub("", (self.directory / "config.pbtxt").read_text())

    @property
    def role(self) -> str:
        found = _ROLE.search(self.configuration)
        return found[1] if found else self.directory.name

    @property
    def backend(self) -> str:
        found = _BACKEND.search(self.configuration)
        return found[1] if found else ""

    @property
    def tensors(self) -> set[str]:
        """Names of its inputs and outputs; empty where the backend completes the configuration when it loads the model."""
        found = _TENSORS.search(self.configuration)
        return set(_TENSOR_NAME.findall(self.configuration, found.start())) if found else set()

    @property
    def is_ours(self) -> bool:
        """True if it uses the engine, as a client or as its owner."""
        text, usual = self.configuration, DEFAULT_REPOSITORY / self.directory.name
        return bool(_ROLE.search(text)) or self.backend in own_backends() or usual.is_dir()

    def streams(self, decoupled: bool) -> bool:
        """True if it may send several responses to a request when it is served with `triton.decoupled` as given. A backend
        of ours that completes configurations makes it so.
        """
        served = _COMMENT.sub("", self.served_configuration(decoupled) or self.configuration)
        found = _DECOUPLED.search(served)
        return found[0].lower().endswith("true") if found else self.backend in own_backends()

    def served_configuration(self, decoupled: bool) -> str | None:
        """The model's configuration as it is served; None where the file is served as it is."""
        text = (self.directory / "config.pbtxt").read_text()
        served = text if decoupled and not self.is_unary else set_decoupled(text, False)
        served = _NAME.sub(f'name: "{self.name}"', served, count=1)
        for key, value in self.parameters:
            served = f'{served.rstrip()}\nparameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
        return None if served == text else served


def own_backends() -> list[str]:
    """The names of the python-based backends that this project brings."""
    return sorted(path.parent.name for path in BACKENDS.glob("*/model.py"))


def profiles() -> dict[str, Path]:
    """Every profile with its directory, the default one first."""
    others = sorted(path for path in PROFILES.glob("*") if any(path.glob("*/config.pbtxt")))
    return {DEFAULT_PROFILE: DEFAULT_REPOSITORY} | {path.name: path for path in others}


def chosen_profiles(text: str) -> tuple[str, ...]:
    """The profiles of a list with commas. `all`: the default one, and each other one that has no model of a name that is
    taken by one before it. Raises UserError for an unknown one.
    """
    known = profiles()
    chosen: list[str] = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        if name == ALL:
            chosen += _without_collisions(known)
        elif name in known:
            chosen.append(name)
        else:
            raise UserError(f"there is no profile {name!r}; give --profile some of {', '.join([*known, ALL])}")
    return tuple(dict.fromkeys(chosen))


def _without_collisions(known: dict[str, Path]) -> list[str]:
    chosen: list[str] = []
    taken: set[str] = set()
    for name, directory in known.items():
        models = {model.name for model in _models_in(directory, name)}
        if not models & taken:
            chosen.append(name)
            taken |= models
    return chosen


def compose(chosen: Sequence[str], repositories: Sequence[Path] = ()) -> list[Model]:
    """The models to serve: those of the profiles (the default one where nothing is chosen) and of the repositories, and the
    two that clients of the engine need. Raises UserError when two have one name, or a directory holds no model.
    """
    known = profiles()
    names = chosen if chosen or repositories else (DEFAULT_PROFILE,)
    models: dict[str, Model] = {}
    for model in [model for name in names for model in _models_in(known[name], f"profile {name}")]:
        _add(models, model)
    for directory in repositories:
        for model in _models_in(check_repository(directory), f"model repository {directory}"):
            _add(models, model)
    _complete(models)
    return list(models.values())


def served_models(config: EngineConfig, chosen: Sequence[str], repositories: Sequence[Path]) -> list[Model]:
    """compose(), with unary twins where the configuration asks for them. Raises UserError."""
    models = compose(chosen, repositories)
    return with_unary_twins(models) if config.triton.decoupled == "both" else models


def with_unary_twins(models: Sequence[Model]) -> list[Model]:
    """The models, and each of ours that streams by default once more as NAME_unary, for clients without streams. Raises UserError
    for a name that is taken.
    """
    found = {model.name: model for model in models}
    for model in models:
        if model.is_ours and model.streams(True) and not model.streams(False):
            _add(
                found,
                Model(model.name + UNARY, model.directory, f"triton.decoupled=both for {model.name}", is_unary=True),
            )
    return list(found.values())


def _models_in(directory: Path, origin: str) -> Iterable[Model]:
    return [Model(path.parent.name, path.parent, origin) for path in sorted(directory.glob("*/config.pbtxt"))]


def _add(models: dict[str, Model], model: Model) -> None:
    other = models.setdefault(model.name, model)
    if other is not model:
        raise UserError(
            f"model {model.name} is in {other.origin} and in {model.origin} too; serve one of the two, or put a copy of the "
            "other under another name into a directory and give that with --model-repository"
        )


def _complete(models: dict[str, Model]) -> None:
    """Add the owner of the engine and the model of the own wire. A repository without any client of the engine stays as it is."""
    if not any(model.is_ours for model in models.values()):
        return
    if not any(model.role == OWNER and model.is_ours for model in models.values()):
        name = OWNER_ELSEWHERE if OWNER in models else OWNER
        _add(models, Model(name, DEFAULT_REPOSITORY / OWNER, "what every profile needs"))
    if OWN_WIRE not in models:
        _add(models, Model(OWN_WIRE, DEFAULT_REPOSITORY / OWN_WIRE, "what every profile needs"))


def repositories_of(models: Sequence[Model], directory: Path, *, decoupled: bool) -> list[Path]:
    """The repositories for tritonserver. One of the user's own that holds no client of the engine is read where it lies, so that
    a model which is put there later can be loaded; all others are as `render` makes them.
    """
    parents = dict.fromkeys(model.directory.parent for model in models)
    apart = [parent for parent in parents if _lies_apart(parent, models, decoupled)]
    rest = [model for model in models if model.directory.parent not in apart]
    return [*([render(rest, directory, decoupled=decoupled)] if rest else []), *(parent.resolve() for parent in apart)]


def _lies_apart(parent: Path, models: Sequence[Model], decoupled: bool) -> bool:
    held = [model for model in models if model.directory.parent == parent]
    changed = any(model.is_ours or model.served_configuration(decoupled) for model in held)
    return not changed and is_plain(parent) and _as_they_lie(held) is not None


def render(models: Sequence[Model], directory: Path, *, decoupled: bool) -> Path:
    """The repository for tritonserver: the models' own directory where it holds just them, as they are to be, and has a path
    that Triton takes; else one under `directory` that is made anew.

    In it only a config.pbtxt that has to be another one is written; everything else is a link to where it comes from.
    """
    whole = _as_they_lie(models)
    if whole and is_plain(whole) and not any(model.served_configuration(decoupled) for model in models):
        return whole
    if directory.exists():
        shutil.rmtree(directory)
    for model in models:
        render_model(model, directory, decoupled=decoupled)
    return directory


def render_model(model: Model, directory: Path, *, decoupled: bool) -> None:
    """Write a model's directory in a repository. Of one that is there only config.pbtxt changes, in one step: Triton may
    read it at any time.
    """
    copy, served = directory / model.name, model.served_configuration(decoupled)
    copy.mkdir(parents=True, exist_ok=True)
    for entry in model.directory.iterdir():
        if (served is None or entry.name != "config.pbtxt") and not (copy / entry.name).is_symlink():
            (copy / entry.name).symlink_to(entry.resolve())
    if served is not None:
        fresh = copy / "config.pbtxt.new"
        fresh.write_text(served)
        fresh.replace(copy / "config.pbtxt")


def _as_they_lie(models: Sequence[Model]) -> Path | None:
    """The directory that holds just these models under just these names, if there is one."""
    (parent, *others) = {model.directory.parent for model in models}
    held = {path.parent.name for path in parent.glob("*/config.pbtxt")}
    served = {model.name for model in models if model.name == model.directory.name}
    return parent.resolve() if not others and held == served and len(served) == len(models) else None


def compile_models(models: Sequence[Model]) -> None:
    """Write the bytecode of each model.py beside it, where it is missing or stale. Else the first import of a stub does, Triton
    takes the changed directory for a changed model as soon as it is asked to load anything, and unloads a model that is
    serving. For the same reason what is fresh stays as it is: another server may serve from the same directory.

    Where the directory is not ours to write nothing happens, for then no stub writes to it either.
    """
    for path in sorted(path for model in models for path in model.directory.glob("*/model.py")):
        compileall.compile_file(path, quiet=2)


def set_decoupled(pbtxt: str, decoupled: bool) -> str:
    """A model configuration with its transaction policy changed; one without a policy stays as it is (not decoupled), and
    so does one whose protocol knows one policy only.
    """
    if _PRESCRIBED in pbtxt:
        return pbtxt
    return _DECOUPLED.sub(f"decoupled: {str(decoupled).lower()}", pbtxt)


def check_repository(source: Path) -> Path:
    """The absolute path of a repository with at least one model. Raises UserError."""
    if not source.is_dir():
        raise UserError(f"model repository {source} is no directory; give one with --model-repository DIR")
    if not any(source.glob("*/config.pbtxt")):
        raise UserError(
            f"model repository {source} holds no model (no */config.pbtxt); give another with --model-repository DIR"
        )
    return source.resolve()
