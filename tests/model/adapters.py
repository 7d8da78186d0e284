"""Random LoRA adapters of tiny checkpoints: as PEFT writes them, as TensorRT-LLM's tensors, and PEFT itself as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from backend.api.lora import LoraConfig
from backend.api.tensor import TensorData

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODULE_IDS = dict(q_proj=1, k_proj=2, v_proj=3, o_proj=4, gate_proj=5, down_proj=6, up_proj=7)


def make_adapter(checkpoint: Path, directory: Path, seed: int, rank: int = 4, size: float = 0.5, **fields: Any) -> Path:
    """An adapter whose B is random too: PEFT begins with zeros, which change nothing."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = dict(r=rank, lora_alpha=2 * rank, target_modules=ALL, task_type="CAUSAL_LM") | fields
    peft_model = get_peft_model(model, PeftConfig(**config))
    with torch.no_grad():
        for name, weight in peft_model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                weight.copy_(torch.randn_like(weight) * size / weight.shape[1] ** 0.5)
    peft_model.save_pretrained(directory)
    return directory


class PeftOracle:
    """Greedy tokens of the checkpoint with an adapter, or none, from transformers and PEFT."""

    def __init__(self, checkpoint: Path, adapter: Path | None) -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.model = model.eval() if adapter is None else PeftModel.from_pretrained(model, adapter).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]


def as_rows(adapter: Path, task_id: int, fused: Sequence[tuple[int, Tensor, Tensor]] = ()) -> LoraConfig:
    """TensorRT-LLM's form of a PEFT directory, as its converter makes it: the factor alpha / rank is part of B."""
    model_config = PeftConfig.from_pretrained(adapter)
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    rows, config = [], []
    for name, a in tensors.items():
        if "lora_A" not in name:
            continue
        parts = name.split(".")
        b = tensors[name.replace("lora_A", "lora_B")] * (model_config.lora_alpha / model_config.r)
        rows.append(torch.cat([a.flatten(), b.flatten()]))
        config.append((MODULE_IDS[parts[-3]], int(parts[parts.index("layers") + 1]), len(a)))
    width = max(map(len, rows))
    weights = torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=7.0) for row in rows])
    data = TensorData("float32", tuple(weights.shape), weights.numpy().tobytes())
    return LoraConfig(task_id, data, tuple(config))
