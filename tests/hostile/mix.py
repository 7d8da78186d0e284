"""Which request comes at which place of a run: a function of the seed and the place alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.hostile import gateway_cases, grpc_cases, http_cases, http_framing, named
from tests.hostile.case import Case
from tests.hostile.served import FRONTS, GATEWAY, TARGETS

MODELS = TARGETS
KINDS = {**http_cases.KINDS, "http-framing": http_framing.framing, **grpc_cases.KINDS, **gateway_cases.KINDS}
_ONLY = {
    **http_cases.ONLY,
    **grpc_cases.ONLY,
    "http-framing": TARGETS,
    **dict.fromkeys(gateway_cases.KINDS, (GATEWAY,)),
}
_TWICE = ("http-framing", "grpc-rows", "grpc-values", "grpc-cancelled", "grpc-twins", "http-json", "grpc-json")


@dataclass(frozen=True)
class Mix:
    """What a run sends. `grpc_error`: the share of gRPC calls with the metadata triton_grpc_error."""

    seed: int
    models: tuple[str, ...] = MODELS
    kinds: tuple[str, ...] = ()  # empty: all, and the named requests first
    grpc_error: float = 0.5
    known_fatal: bool = False  # the metadata also where it is fatal by a documented bug

    def case(self, index: int) -> Case:
        """The request at place `index`, always the same."""
        rng = random.Random(f"{self.seed}:{index}")
        first = self.named()
        found = first[index] if index < len(first) else self._drawn(rng)
        wanted = rng.random() < self.grpc_error
        return found.with_grpc_error(wanted and (self.known_fatal or not found.known_fatal))

    def named(self) -> list[Case]:
        """The named requests, which open a run of all kinds."""
        return [] if self.kinds else [case for case in named.small() if case.model in self.models]

    def _drawn(self, rng: random.Random) -> Case:
        if self.known_fatal and rng.random() < 0.01:
            fatal = rng.choice((grpc_cases.classification, http_cases.huge_shape))
            return fatal(rng, rng.choice([model for model in self.models if model != GATEWAY]))
        chosen = [kind for kind in self.kinds or (*KINDS, *_TWICE) if self._models_of(kind)]
        if not chosen:
            raise ValueError(f"no request of {', '.join(self.kinds)} is for {', '.join(self.models)}; choose others")
        kind = rng.choice(chosen)
        return KINDS[kind](rng, rng.choice(self._models_of(kind)))

    def _models_of(self, kind: str) -> list[str]:
        return [model for model in self.models if model in _ONLY.get(kind, FRONTS)]
