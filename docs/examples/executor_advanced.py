r"""Many requests at once, read from a file of token ids (a request per line), streamed or not, and the Executor's statistics.

    .venv/bin/python docs/examples/executor_advanced.py --model_path models/default \
        --input_tokens_csv_file docs/examples/prompts.csv

With --use_orchestrator_mode the engine is a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import datetime
from pathlib import Path

from compat import trtllm


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Many requests, answered by the Executor")
    parser.add_argument("--model_path", required=True, help="directory of a checkpoint")
    parser.add_argument("--input_tokens_csv_file", type=Path, required=True, help="token ids, a request per line")
    parser.add_argument("--output_tokens_csv_file", type=Path, help="where the tokens are written; unset: printed")
    parser.add_argument("--max_tokens", type=int, default=20)
    parser.add_argument("--beam_width", type=int, default=1)
    parser.add_argument("--streaming", action="store_true")
    parser.add_argument("--exclude_input_from_output", action="store_true")
    parser.add_argument("--use_orchestrator_mode", action="store_true")
    parser.add_argument("--timeout_ms", type=int, default=60_000, help="for all requests together")
    return parser.parse_args()


def make_executor(arguments: argparse.Namespace) -> trtllm.Executor:
    config = trtllm.ExecutorConfig(arguments.beam_width, kv_cache_config=trtllm.KvCacheConfig(max_tokens=4096))
    if arguments.use_orchestrator_mode:
        config.parallel_config = trtllm.ParallelConfig(
            communication_mode=trtllm.CommunicationMode.ORCHESTRATOR,
            orchestrator_config=trtllm.OrchestratorConfig(is_orchestrator=True),
        )
    return trtllm.Executor(arguments.model_path, trtllm.ModelType.DECODER_ONLY, config)


def enqueue(executor: trtllm.Executor, arguments: argparse.Namespace) -> list[int]:
    output = trtllm.OutputConfig(exclude_input_from_output=arguments.exclude_input_from_output)
    sampling = trtllm.SamplingConfig(arguments.beam_width)
    with arguments.input_tokens_csv_file.open() as file:
        prompts = [[int(token) for token in row] for row in csv.reader(file)]
    requests = [
        trtllm.Request(
            prompt,
            arguments.max_tokens,
            streaming=arguments.streaming,
            sampling_config=sampling,
            output_config=output,
        )
        for prompt in prompts
    ]
    return executor.enqueue_requests(requests)


def collect(executor: trtllm.Executor, ids: list[int], timeout: datetime.timedelta) -> dict[int, list[list[int]]]:
    """Tokens of each beam, by request."""
    tokens: dict[int, list[list[int]]] = {request_id: [] for request_id in ids}
    unfinished, end = set(ids), datetime.datetime.now() + timeout
    while unfinished and datetime.datetime.now() < end:
        for response in executor.await_responses(datetime.timedelta(milliseconds=100)):
            if response.has_error():
                raise RuntimeError(f"request {response.request_id}: {response.error_msg}")
            result = response.result
            beams = tokens[response.request_id]
            for beam, new in enumerate(result.output_token_ids):
                if beam == len(beams):
                    beams.append([])
                beams[beam] += new
            if result.is_final:
                unfinished.remove(response.request_id)
    return tokens


def main() -> None:
    arguments = parse()
    with make_executor(arguments) as executor:
        ids = enqueue(executor, arguments)
        tokens = collect(executor, ids, datetime.timedelta(milliseconds=arguments.timeout_ms))
        rows = [",".join(map(str, beam)) for request_id in ids for beam in tokens[request_id]]
        if arguments.output_tokens_csv_file:
            arguments.output_tokens_csv_file.write_text("\n".join(rows) + "\n")
        else:
            print("\n".join(rows))
        stats = executor.get_latest_iteration_stats()
        most = max(each.inflight_batching_stats.num_scheduled_requests for each in stats)
        print(f"{len(ids)} requests in {len(stats)} iterations, at most {most} at once")


if __name__ == "__main__":
    main()
