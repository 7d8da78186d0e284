"""What is compared: the engines, the settings each is measured in, and how much memory each takes."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers import run_openvino

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

    @property
    def module(self) -> str:
        """The runner's module."""
        return f"benchmarks.peers.run_{self.name}"

    def held_bytes(self, weight_bytes: int, kv_bytes: int) -> int:
        """Estimate; both arguments in bytes, the weights in the measured format."""
        return int(self.weight_copies * weight_bytes + kv_bytes + self.base_gib * GIB)


_OPENVINO_BF16, _OPENVINO_F32 = run_openvino.SETTINGS
PEERS = {
    "openvino": EngineSpec(
        "openvino",
        {"bf16": (_OPENVINO_BF16,), "int8": (_OPENVINO_BF16, _OPENVINO_F32)},
        weight_copies=1.1,
        base_gib=0.6,
        requirements="openvino.txt",
        removed=("torchvision",),
    ),
    "llamacpp": EngineSpec(
        "llamacpp",
        {"bf16": ("bf16",), "int8": ("q8_0",)},
        weight_copies=1.1,
        base_gib=0.3,
        requirements="llamacpp.txt",
    ),
    "vllm": EngineSpec(
        "vllm",
        {"bf16": ("bf16",)},
        weight_copies=1.1,
        base_gib=1.9,
        lacks="vLLM on a CPU quantises no checkpoint to int8 weights at load",
        requirements="vllm.txt",
        removed=("torchvision", "torchaudio", "torchcodec"),
    ),
    "transformers": EngineSpec(
        "transformers",
        {"bf16": ("bf16",)},
        weight_copies=1.1,
        base_gib=0.5,
        lacks="transformers has no int8 weights on a CPU without further packages",
    ),
}


def ours(int8: str) -> EngineSpec:
    """This engine; `int8`: the value of model.quantization that counts as int8 weights."""
    return EngineSpec(OURS, {"bf16": ("bf16",), "int8": (int8,)}, weight_copies=1.25, base_gib=0.4)
