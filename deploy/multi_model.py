"""From models.json, or several --model, to the sets of a server: checked, with memory and threads divided, before a start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from backend.api.config.schema import EngineConfig
from deploy import capacity
from deploy.engine_sets import EngineSet
from deploy.errors import UserError
from deploy.models_file import Entry, Models
from deploy.repository import served_models
from deploy.shares import Share, WantedModel, divide, free_bytes, share_again

Configure = Callable[[str, Entry], EngineConfig]
# Keys of files and addresses that two engines cannot share, as section.key
ALONE = (
    *("sessions.directory", "kv_cache.directory", "kv_events.endpoint", "kv_events.replay_endpoint"),
    *("workers.join_address", "kv_transfer.directory"),
)


class MultiModel:
    """The models of one server. `sets`: the default one first."""

    def __init__(
        self,
        models: Models,
        configure: Configure,
        cores: int,
        profiles: Sequence[str] = (),
        repositories: Sequence[Path] = (),
        free: Callable[[EngineConfig], int] = free_bytes,
    ) -> None:
        """`configure`: the configuration of a model of that name. Raises UserError in one sentence for whatever is wrong."""
        self.models, self._configure = models, configure
        wanted = {name: self._wanted(name, entry) for name, entry in models.entries.items()}
        _check_alone({name: each.config for name, each in wanted.items()})
        self.available = min(free(each.config) for each in wanted.values())
        self.shares = divide(wanted, self.available, cores)
        first = next(iter(wanted))
        base = served_models(wanted[first].config, profiles, repositories)
        self.checkpoints = {name: each.checkpoint for name, each in wanted.items()}
        self.sets = [
            EngineSet(name, each.entry, self.shares[name], base, is_default=name == first, number=number)
            for number, (name, each) in enumerate(wanted.items(), 1)
        ]
        taken = [model.name for each in self.sets for model in each.models]
        if twice := [name for name in taken if taken.count(name) > 1]:
            raise UserError(f"two Triton models would be called {twice[0]}; choose other names for the models")

    @property
    def default(self) -> EngineSet:
        return self.sets[0]

    def generates(self, name: str) -> bool:
        """False for a model that makes embeddings only."""
        return self.checkpoints[name].generates

    def generates_with(self, share: Share) -> bool:
        return capacity.examined(share.config).generates

    def described_again(self, engines: EngineSet, beside: bool) -> tuple[Entry, Share]:
        """A model as models.json describes it now. `beside`: its former engine runs on for a while. Raises UserError."""
        models = self.models.again()
        if engines.name not in models.entries:
            raise UserError(
                f"model {engines.name} is no longer in models.json; put it back, or restart the server without it"
            )
        entry = models.entries[engines.name]
        former = self.models.entries[engines.name]
        for key in ("names", "lora"):
            if getattr(entry, key) != getattr(former, key):
                raise UserError(
                    f"model {engines.name}: {key} has changed in models.json, which needs a restart of the server"
                )
        wanted = self._wanted(engines.name, entry)
        others = {each.name: each.engine.share.config for each in self.sets if each is not engines}
        _check_alone({**others, engines.name: wanted.config}, beside=engines.name if beside else "")
        return entry, share_again(engines.name, wanted, engines.engine.share, self.available)

    def _wanted(self, name: str, entry: Entry) -> WantedModel:
        try:
            config = self._configure(name, entry)
            return WantedModel(entry, config, capacity.examined(config))
        except UserError as error:
            raise UserError(f"model {name}: {error}") from None


def _check_alone(configs: dict[str, EngineConfig], beside: str = "") -> None:
    """Raise UserError where two engines would use one file or address. `beside`: a model that is to have two for a while."""
    for place in ALONE:
        section, _, key = place.partition(".")
        owners: dict[str, str] = {}
        for name, config in configs.items():
            value = msgspec.to_builtins(getattr(config, section)).get(key)
            if not value:
                continue
            if name == beside:
                raise UserError(
                    f"model {name} has {place}={value}, which two engines cannot use at once; unload and load it in place of "
                    "replacing it"
                )
            if (other := owners.setdefault(str(value), name)) != name:
                raise UserError(f"models {other} and {name} both have {place}={value}; give each of them its own")
