"""Builds the ModelServer of each Triton model. The adapters in model_repository/*/1/model.py call it from initialize().

`tensorrt_llm` owns the engine process. The text models are clients of the same engine and bring their own tokenizer,
so no response passes through Triton twice. They are Python models because a real Triton ensemble swallows cancellation.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from backend.api import EngineUnavailable
from backend.executor import Executor
from backend.serving import pb
from backend.serving.environment import Health, RunDirectory, check_numpy, drain_grace_s, engine_config
from backend.serving.model_server import EngineClient, ModelServer, is_decoupled
from backend.serving.reading import Batch
from backend.serving.requests import Parameters, ServingContext, Work
from backend.serving.tensors import MODELS, TOKEN_MODEL
from backend.serving.text_requests import TextTools, check_text_requests, parse_text_requests
from backend.serving.token_requests import parse_token_requests

log = logging.getLogger("everbatch.serving")


def load_token_model(args: dict[str, str]) -> ModelServer:
    """Start the engine and serve token ids. Raises ConfigError or EngineUnavailable; nothing keeps running then."""
    _prepare_process(args)
    config = engine_config()
    run_directory = RunDirectory.of_this_server()
    run_directory.claim()
    try:
        executor = Executor.launch(config, run_directory.socket_path)
    except BaseException:  # Whatever ended the start, the text models must not wait for this owner. It is raised again.
        run_directory.disclaim()
        raise
    return ModelServer(
        TOKEN_MODEL,
        parse_token_requests,
        executor,
        config,
        decoupled=is_decoupled(args["model_config"]),
        owner=True,
        labels=_labels(args),
        drain_grace_s=drain_grace_s(),
        report_health=_report_to(run_directory, args),
    )


def load_text_model(args: dict[str, str]) -> ModelServer:
    """Serve text with the engine that `tensorrt_llm` owns. Without an engine, requests are refused with UNAVAILABLE."""
    _prepare_process(args)
    config = engine_config()
    run_directory = RunDirectory.of_this_server()
    executor = Executor.attach(run_directory.socket_path, wait_s=0)
    front = TextFront(executor)
    if not run_directory.wait_for_engine(executor.is_ready, config.triton.attach_timeout_s):
        log.warning(
            "model %s is loaded without an engine; it serves as soon as tensorrt_llm has started one",
            args["model_name"],
        )
    return ModelServer(
        MODELS[args["model_name"]],
        front.parse,
        executor,
        config,
        decoupled=is_decoupled(args["model_config"]),
        labels=_labels(args),
        drain_grace_s=drain_grace_s(),
        check_text=front.check,
        prepare=front.prepare,
        report_health=_report_to(run_directory, args),
    )


class TextFront:
    """Parses requests of the text models. Its tokenizer is loaded later, when the engine has named the directory."""

    def __init__(self, executor: EngineClient):
        self._executor = executor
        self._tools: TextTools | None = None
        self._lock = threading.Lock()

    def prepare(self) -> bool:
        """Load the tokenizer if the engine has been reached; return whether the tokenizer is loaded.

        Raises ConfigError when the model's directory has no tokenizer.
        """
        hello = self._executor.hello
        with self._lock:
            if self._tools is None and hello is not None:
                self._tools = TextTools.from_directory(hello.model_path)
            return self._tools is not None

    def check(self, batch: Batch, context: ServingContext) -> None:
        """Refuse what `check_text_requests` refuses. Raises EngineUnavailable before the tokenizer is loaded."""
        self._loaded_tools()
        check_text_requests(batch, context)

    def parse(self, batch: Batch, context: ServingContext, parameters: Parameters) -> list[Work]:
        """Tokenise and parse a request; called on a text thread. Raises as `parse_text_requests` does."""
        return parse_text_requests(batch, context, parameters, self._loaded_tools())

    def _loaded_tools(self) -> TextTools:
        if self._tools is None:
            raise EngineUnavailable("the tokenizer is not loaded yet; try again in a few seconds")
        return self._tools


def _prepare_process(args: dict[str, str]) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s {args['model_name']} %(levelname)s %(name)s: %(message)s",
    )
    check_numpy(pb.numpy_round_trip_works)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # The text threads already tokenise in parallel.


def _report_to(run_directory: RunDirectory, args: dict[str, str]) -> Callable[[Health], None]:
    return lambda state: run_directory.report_health(args["model_name"], state)


def _labels(args: dict[str, str]) -> dict[str, str]:
    return {"model": args["model_name"], "version": args["model_version"]}
