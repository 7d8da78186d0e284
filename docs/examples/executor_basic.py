"""The Executor in a few lines: one request, its tokens.

    .venv/bin/python docs/examples/executor_basic.py --model_path models/default

The same program runs on TensorRT-LLM with the import changed.
"""

from __future__ import annotations

import argparse

from compat import trtllm


def main() -> None:
    parser = argparse.ArgumentParser(description="One request, answered by the Executor")
    parser.add_argument("--model_path", required=True, help="directory of a checkpoint")
    arguments = parser.parse_args()

    executor = trtllm.Executor(arguments.model_path, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(1))
    if executor.can_enqueue_requests():
        request = trtllm.Request(input_token_ids=[1, 2, 3, 4], max_tokens=10)
        request_id = executor.enqueue_request(request)
        responses = executor.await_responses(request_id)
        print(responses[0].result.output_token_ids)


if __name__ == "__main__":
    main()
