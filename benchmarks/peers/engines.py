"""What is compared: the engines, the settings each is measured in, and how much memory each takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.peers import run_openvino
from deploy.errors import UserError

OURS = "everbatch"
GIB = 2**30


@dataclass(frozen=True)
class EngineSpec:
    """`settings`: by weights; an engine without an entry does not offer them, and `lacks` says so in one sentence.

    What an engine holds is estimated as `weight_copies` x weights + KV + `base_gib` (measured on M and L, rounded up; without
    mapped files that it has copied, which the system can drop).
    """

    name: str
    settings: dict[str, tuple[str, ...]]
    weight_copies: float
    base_gib: float
    lacks: str = ""
    requirements: str = ""  # file of an environment of its own; empty: ours
    removed: tuple[str, ...] = ()  # packages whose pins pull builds that do not match, taken out again
    converter: str = (
        ""  # the peer whose environment makes the forms of the model that this engine reads; empty: its own
    )

    @property
    def module(self) -> str:
        """The runner's module."""
        return f"benchmarks.peers.run_{self.name}"

    def held_bytes(self, weight_bytes: int, kv_bytes: int) -> int:
        """Estimate; both arguments in bytes, the weights in the measured format."""
        return int(self.weight_copies * weight_bytes + kv_bytes + self.base_gib * GIB)


FILE = "file"  # weights of a GGUF file that every engine reads as it is
GGUF_TYPES = {"bf16": ("bf16",), "int8": ("q8_0",), FILE: (FILE,)}
PEERS = {
    "openvino": EngineSpec(
        "openvino",
        run_openvino.SETTINGS_OF,
        weight_copies=1.1,
        base_gib=0.6,
        requirements="openvino.txt",
        removed=("torchvision",),
    ),
    "llamacpp": EngineSpec(
        "llamacpp",
        GGUF_TYPES | {"int4": ("q4_0", "q4_k_m")},
        weight_copies=1.1,
        base_gib=0.3,
        requirements="llamacpp.txt",
    ),
    "ik_llamacpp": EngineSpec(
        "ik_llamacpp",
        GGUF_TYPES | {"int4": ("q4_0", "q4_k_m", "iq4_nl")},
        weight_copies=1.1,
        base_gib=0.5,
        requirements="ik_llamacpp.txt",
        converter="llamacpp",
    ),
    "vllm": EngineSpec(
        "vllm",
        {"bf16": ("bf16",)},
        weight_copies=1.1,
        base_gib=1.9,
        lacks="vLLM on a CPU quantises no checkpoint to int8 or int4 weights at load, and reads no GGUF file",
        requirements="vllm.txt",
        removed=("torchvision", "torchaudio", "torchcodec"),
    ),
    "transformers": EngineSpec(
        "transformers",
        {"bf16": ("bf16",)},
        weight_copies=1.1,
        base_gib=0.5,
        lacks="transformers has no int8 or int4 weights on a CPU without further packages, and makes floats of a GGUF file",
    ),
}


def ours(int8: str = "w8a8", int4: str = "w4a8") -> EngineSpec:
    """This engine; `int8` and `int4`: the values of model.quantization that count as such weights."""
    return EngineSpec(
        OURS, {"bf16": ("bf16",), "int8": (int8,), "int4": (int4,), FILE: (FILE,)}, weight_copies=1.25, base_gib=0.4
    )


def chosen(texts: Sequence[str], weights: str) -> list[EngineSpec]:
    """The peers of `NAME`, with all their settings, or `NAME:SETTING`, with that one; in the order of names. Raises UserError."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, colon, setting = text.partition(":")
        if name not in PEERS:
            raise UserError(f"--peers has {text!r}; choose from {', '.join(PEERS)}, separated by commas")
        known = PEERS[name].settings.get(weights, ())
        if colon and setting not in known:
            raise UserError(
                f"--peers has {text!r}; with --weights {weights} {name} has {', '.join(known) or 'no setting'}"
            )
        settings.setdefault(name, []).extend([setting] if colon else known)
    return [
        replace(PEERS[name], settings=PEERS[name].settings | {weights: tuple(dict.fromkeys(some))})
        for name, some in settings.items()
    ]
