"""A logits post-processor that allows even token ids only, for the requests that name it.

.venv/bin/python docs/examples/executor_logits_processor.py --model_path models/default
"""

from __future__ import annotations

import argparse

import torch

from compat import trtllm


def even_only(
    request_id: int, logits: torch.Tensor, tokens: list[list[int]], stream: int, client_id: int | None
) -> None:
    """Change the logits in place."""
    logits[..., 1::2] = float("-inf")


def main() -> None:
    parser = argparse.ArgumentParser(description="Even tokens only")
    parser.add_argument("--model_path", required=True, help="directory of a checkpoint")
    arguments = parser.parse_args()

    config = trtllm.ExecutorConfig(1)
    config.logits_post_processor_config = trtllm.LogitsPostProcessorConfig({"even": even_only})
    with trtllm.Executor(arguments.model_path, trtllm.ModelType.DECODER_ONLY, config) as executor:
        for name in (None, "even"):
            output = trtllm.OutputConfig(exclude_input_from_output=True)
            request = trtllm.Request([1, 2, 3, 4], 10, output_config=output, logits_post_processor_name=name)
            (response,) = executor.await_responses(executor.enqueue_request(request))
            print(name, response.result.output_token_ids[0])


if __name__ == "__main__":
    main()
