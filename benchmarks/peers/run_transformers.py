"""Runner of transformers: `generate` over a static batch. (Its continuous batching is slower on a CPU.)"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.protocol import Load, Timing, serve


class Transformers:
    note = ""

    def __init__(self, load: Load) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(load.threads)
        self._model = AutoModelForCausalLM.from_pretrained(load.model, dtype=torch.bfloat16).eval()

    def measure(self, prompts: list[list[int]], new: int) -> Timing:
        import torch

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        times: list[float] = []

        def note_time(input_ids: Any, scores: Any, **_: Any) -> Any:
            """A stopping criterion that never stops: it is asked after each token."""
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        began = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
                stopping_criteria=[note_time],
            )
        if output.shape[1] != ids.shape[1] + new:
            raise RuntimeError(f"generate gave {output.shape[1] - ids.shape[1]} tokens, {new} were asked for")
        return Timing(times[0] - began, times[-1] - times[0], len(prompts) * (new - 1))


if __name__ == "__main__":
    serve(Transformers, ["transformers", "torch"])
