"""Several models in one server: each has an engine, and a set of Triton models that are its clients (docs/several-models.md).

    model NAME     its Triton models, here with the default profile
    the first      tensorrt_llm, ensemble, everbatch, ... and NAME.engine
    any other      NAME.tensorrt_llm, NAME.ensemble, NAME.everbatch, ... and NAME.engine

NAME.engine starts the engine process, and is asked by no client. Each engine has a number and by it a directory of its own below
that of the server, with its configuration and its socket. A replacement is another engine: NAME.engine-N. The others of the set
are clients of the engine that their config.pbtxt names, which is written anew when they are to move.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from backend.api.config.multi_model import ENGINE, FILE, LABEL, OWNS, Notice
from deploy import rundir
from deploy.models_file import Entry
from deploy.repository import DEFAULT_REPOSITORY, OWNER, Model, render_model
from deploy.shares import Share

OWN_MODEL = "everbatch"  # the Triton model that the OpenAI endpoint asks


class Engine:
    """An engine of a model, present or former."""

    def __init__(self, name: str, number: int, share: Share, *, is_first: bool) -> None:
        self.number, self.share = number, share
        self.owner = f"{name}.engine" if is_first else f"{name}.engine-{number}"
        self._parameters = ((ENGINE, f"e{number}"), (OWNS, "true"), (LABEL, name))
        self.origin = f"the engine of model {name}"

    @property
    def model(self) -> Model:
        """The Triton model that starts it."""
        return Model(self.owner, DEFAULT_REPOSITORY / OWNER, self.origin, parameters=self._parameters)

    def directory(self, place: Path) -> Path:
        return place / f"e{self.number}"

    def lay_out(self, place: Path) -> None:
        """Make the engine set's directory within the server's run directory."""
        directory = self.directory(place)
        shutil.rmtree(directory, ignore_errors=True)
        rundir.prepare_run_directory(directory)
        rundir.write_config(directory, self.share.config)

    def remove(self, place: Path) -> None:
        """Remove the engine set's directory, and the set's models from the repository."""
        shutil.rmtree(self.directory(place), ignore_errors=True)
        shutil.rmtree(place / "models" / self.owner, ignore_errors=True)

    def tell(self, place: Path, notice: Notice | None) -> None:
        """Tell the clients of the engine that it is away on purpose; None: it is there."""
        path = self.directory(place) / FILE
        if notice is None:
            path.unlink(missing_ok=True)
            return
        fresh = rundir.write_private(path.with_suffix(".new"), msgspec.json.encode(notice).decode())
        fresh.replace(path)


class EngineSet:
    """One model of a server: its present engine, and the Triton models that are clients of it."""

    def __init__(
        self, name: str, entry: Entry, share: Share, models: Sequence[Model], *, is_default: bool, number: int
    ) -> None:
        """`models`: those of a server with one model. `number`: of its first engine."""
        self.name, self.entry, self.is_default = name, entry, is_default
        self.engine = Engine(name, number, share, is_first=True)
        self.first_number = number
        self._models = [model for model in models if model.is_ours or is_default]

    def start_again(self) -> None:
        """The server starts again: the present engine is the first of a new life."""
        self.engine = Engine(self.name, self.first_number, self.engine.share, is_first=True)

    def triton_name(self, name: str) -> str:
        return name if self.is_default else f"{self.name}.{name}"

    def clients(self, engine: Engine) -> list[Model]:
        """The Triton models of a set, as clients of an engine."""
        return [self._client(model, engine) for model in self._models if model.is_ours]

    def client_names(self) -> set[str]:
        return {self.triton_name(model.name) for model in self._models if model.is_ours}

    @property
    def models(self) -> list[Model]:
        """All of it, the engine's own first."""
        others = [model for model in self._models if not model.is_ours]
        return [self.engine.model, *self.clients(self.engine), *others]

    @property
    def own_wire(self) -> str:
        return self.triton_name(OWN_MODEL)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients of the OpenAI endpoint may give as `model`."""
        return (*((OWN_MODEL,) if self.is_default else ()), self.name, *self.entry.names)

    def render(self, models: Sequence[Model], repository: Path) -> None:
        """Write Triton models into the repository of a server that runs."""
        for model in models:
            render_model(model, repository, decoupled=bool(self.engine.share.config.triton.decoupled))

    def _client(self, model: Model, engine: Engine) -> Model:
        parameters = ((ENGINE, f"e{engine.number}"), (OWNS, "false"))
        name = self.triton_name(model.name)
        return Model(name, model.directory, f"{model.origin} for model {self.name}", model.is_unary, parameters)
