"""LLM: generates with a model from Python, with the names of TensorRT-LLM's LLM API."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from backend.api import ConfigError, EverbatchError, InvalidRequest
from backend.api.checkpoint.gguf_parts import parts_of
from backend.text.chat import ChatTemplate
from backend.text.tokenizer import NAMED_TOKENS, Tokenizer
from compat.llm.arguments import LlmArguments
from compat.llm.chat import ChatTokenizer
from compat.llm.errors import BatchError, NotHere, ParameterError, RequestError
from compat.llm.executor import GenerationExecutor, for_each
from compat.llm.images import lifted
from compat.llm.ray_executor import RayExecutor
from compat.llm.requests import GenerationRequest
from compat.llm.result import RequestOutput
from compat.llm.sampling_params import SamplingParams
from compat.llm.statistics import IterationResult
from compat.llm.worker import GenerationExecutorProxy, GenerationExecutorWorker

PROMPT_KEYS = {"prompt", "prompt_token_ids", "query_token_ids", "multi_modal_data"}


class LLM:
    """One model, ready to generate. Any thread may call its methods. End it with `shutdown`, or use it as a context manager."""

    def __init__(
        self,
        model: str | Path | None = None,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Load a checkpoint: its directory, a hub id, or None for the default model.

        `tokenizer`: a directory, a GGUF file, a Tokenizer, or a fast tokenizer of transformers. `docs/llm.md` lists the
        keyword arguments. Raises TypeError for an unknown one, NotHere for what this version does not have, and ConfigError.
        """
        named = {
            "tokenizer_mode": tokenizer_mode,
            "trust_remote_code": bool(trust_remote_code),
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "revision": revision,
            "tokenizer_revision": tokenizer_revision,
        }
        self.args = LlmArguments({**named, **kwargs})
        kind = _kind_of_executor(self.args)
        with loading(self.args.shows_progress):
            self._executor = kind.of_model(
                model,
                self.args.config,
                _as_tokenizer(tokenizer),
                self.args.postprocess,
                with_tokenizer=not skip_tokenizer_init,
                stream_interval=self.args.stream_interval,
                batched_logits_processor=self.args.batched_logits_processor,
            )

    @classmethod
    def from_executor(
        cls,
        executor: GenerationExecutorWorker,
        *,
        max_input_len: int | None = None,
        max_beam_width: int | None = None,
        return_perf_metrics: bool = False,
    ) -> LLM:
        """An LLM over an existing executor, which it then owns."""
        llm = cls.__new__(cls)
        llm.args = LlmArguments(
            {
                "max_input_len": max_input_len,
                "max_beam_width": max_beam_width,
                "return_perf_metrics": return_perf_metrics,
            }
        )
        llm._executor = executor
        return llm

    @property
    def executor(self) -> GenerationExecutor:
        return self._executor

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of each worker (see RayExecutor); returns one value for each. Raises NotHere without Ray."""
        if not isinstance(self._executor, RayExecutor):
            raise NotHere("the workers of this LLM are no actors; give it orchestrator_type='ray'")
        return self._executor.collective_rpc(method, args, kwargs)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with `skip_tokenizer_init`."""
        return self._executor.tokenizer

    def generate(
        self,
        inputs: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate for one prompt, or for a list of them, and block until all are done.

        A prompt is a text, a list of token ids, or a dictionary with `prompt` or `prompt_token_ids`; a list of whole numbers is
        one prompt. `multi_modal_data` of a dictionary has its pictures: {"image": one or a list of PIL images, bytes, paths}.
        Each other argument is one value, or a list with one for each prompt. Several prompts give a list.
        A prompt that fails does not stop the others: BatchError, which holds their outputs, is raised when all are done.
        """
        is_one = _is_one(inputs)
        prompts = [inputs] if is_one else list(inputs)
        fields = dict(
            sampling_params=sampling_params,
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            kv_cache_retention_config=kv_cache_retention_config,
            disaggregated_params=disaggregated_params,
            scheduling_params=scheduling_params,
            cache_salt=cache_salt,
        )
        columns = {name: for_each(name, value, len(prompts)) for name, value in fields.items()}
        outputs: dict[int, RequestOutput] = {}
        errors: dict[int, EverbatchError] = {}
        try:
            for n, prompt in enumerate(prompts):
                try:
                    outputs[n] = self.generate_async(prompt, **{name: column[n] for name, column in columns.items()})
                except InvalidRequest as error:
                    errors[n] = error
            for n in with_bar(list(outputs), len(outputs), use_tqdm):
                try:
                    outputs[n].result()
                except RequestError as error:
                    errors[n] = error
                    del outputs[n]
        except BaseException:
            for output in outputs.values():
                if not output.done:
                    output.abort()
            raise
        if errors:
            raise errors[0] if is_one else BatchError([outputs.get(n) for n in range(len(prompts))], errors)
        return outputs[0] if is_one else list(outputs.values())

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **fields: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate the next message of a conversation, or of each of several, with the chat template of the model.

        A conversation is a list of messages, as `[{"role": "user", "content": "Hi"}]`. `fields`: further ones of `generate`.
        A content may have pictures among its parts: `image_url` (a data: URL), `image_pil`, `image_data` or `image`.
        Raises Unsupported for a model without a chat template.
        """
        tokenizer = self.tokenizer
        if not isinstance(tokenizer, ChatTokenizer):
            raise ParameterError("there is no chat template; load the model with its tokenizer, or give its directory")

        def prompt(conversation: Any) -> dict[str, Any]:
            shown, pictures = lifted(conversation)
            ids = tokenizer.apply_chat_template(shown, tools, add_generation_prompt)
            return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}

        is_one = bool(messages) and isinstance(messages[0], dict)
        prompts = prompt(messages) if is_one else [prompt(each) for each in messages]
        return self.generate(prompts, sampling_params, use_tqdm, **fields)

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
        priority: float | None = None,
    ) -> RequestOutput:
        """Begin to generate for one prompt, and return at once. The result can be awaited, iterated and waited for."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params is a {type(params).__name__}, SamplingParams are needed")
        prompt = inputs if isinstance(inputs, dict) else {}
        text, ids = self._read(inputs, params)
        request = GenerationRequest(
            ids,
            self._with_metrics(params),
            query_token_ids=prompt.get("query_token_ids"),
            lora_request=lora_request,
            prompt_adapter_request=prompt_adapter_request,
            streaming=streaming,
            multimodal_params=prompt.get("multi_modal_data"),
            kv_cache_retention_config=kv_cache_retention_config,
            disaggregated_params=disaggregated_params,
            scheduling_params=scheduling_params,
            cache_salt=cache_salt,
            priority=priority,
        )
        self._executor.place_images(request)
        self._check(request.prompt_token_ids, params)
        return RequestOutput.from_generation_result(self._executor.submit(request), text)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Statistics of the iterations since the last call; waits up to `timeout` seconds for the first."""
        return self._executor.get_stats(timeout or 0.0)

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        """What `get_stats` gives, as an asynchronous iterator, which ends when nothing comes for `timeout` seconds."""
        return self._executor.aget_stats(timeout or 0.0)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Changes of the KV cache since the last call. Raises NotHere unless `event_buffer_max_size` is set."""
        return self._executor.get_kv_events(timeout or 0.0)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        """What `get_kv_cache_events` gives, as an asynchronous iterator, which ends when nothing comes for `timeout` seconds."""
        return self._executor.aget_kv_events(timeout or 0.0)

    def save(self, engine_dir: str | Path) -> None:
        """Copy the checkpoint or GGUF file to a new or empty directory, from which it can be loaded again."""
        path, target = self._executor.hello.model_path, Path(engine_dir)
        source = Path(path)
        if path in ("", ".") or not source.exists():  # Tensors in memory have the path ".".
            raise ConfigError("the model was not loaded from a directory, so there is nothing to copy")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target.name} exists and is not empty; give a new directory")
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()) if source.is_dir() else parts_of(source):
            if file.is_file():
                shutil.copyfile(file, target / file.name)

    def shutdown(self) -> None:
        """End the engine. Results that are pending fail. Calling it again does nothing."""
        self._executor.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __getstate__(self) -> object:
        raise RuntimeError("LLM object can not be pickled.")

    def _read(self, inputs: Any, params: SamplingParams) -> tuple[str | None, Any]:
        """The text of a prompt if it has one, and its token ids."""
        if isinstance(inputs, dict):
            unknown = sorted(set(inputs) - PROMPT_KEYS)
            if unknown:
                raise ParameterError(f"a prompt has the key {unknown[0]!r}; known are {', '.join(sorted(PROMPT_KEYS))}")
            inputs = inputs.get("prompt_token_ids", inputs.get("prompt"))
        if not isinstance(inputs, str):
            return None, _truncated(inputs, params)
        if self.tokenizer is None:
            raise ParameterError("the prompt is text, and there is no tokenizer; give token ids")
        return inputs, _truncated(self.tokenizer.encode(inputs, params.add_special_tokens), params)

    def _check(self, ids: Any, params: SamplingParams) -> None:
        longest, widest = self.args.max_input_len, self.args.max_beam_width
        if longest is not None and len(ids) > longest:
            raise ParameterError(
                f"the prompt has {len(ids)} tokens, the limit is {longest} (max_input_len); shorten it"
            )
        if widest is not None and params.use_beam_search and params.num_sequences > widest:
            raise ParameterError(f"best_of is {params.best_of} beams, the limit is {widest} (max_beam_width); lower it")

    def _with_metrics(self, params: SamplingParams) -> SamplingParams:
        """`params`, or a copy that also asks for metrics if the LLM was made with `return_perf_metrics`."""
        if not self.args.returns_metrics or params.return_perf_metrics:
            return params
        return SamplingParams(**{**vars(params), "return_perf_metrics": True})


def _kind_of_executor(args: LlmArguments) -> type[GenerationExecutorWorker]:
    if args.config.workers.orchestrator == "ray":
        return RayExecutor
    return GenerationExecutorProxy if args.has_own_process else GenerationExecutorWorker


def _is_one(inputs: Any) -> bool:
    """True if this is one prompt, not a list of prompts."""
    if not isinstance(inputs, list | tuple):
        return True
    return bool(inputs) and hasattr(inputs[0], "__index__")


def _truncated(ids: Any, params: SamplingParams) -> Any:
    """The last `truncate_prompt_tokens` tokens of the prompt."""
    return ids if params.truncate_prompt_tokens is None else ids[-params.truncate_prompt_tokens :]


def _as_tokenizer(given: Any) -> Any:
    """A directory or a Tokenizer unchanged; a fast tokenizer of transformers as a Tokenizer of this project."""
    backend = getattr(given, "backend_tokenizer", None)
    if backend is None:
        return given
    named = {name: getattr(given, name, None) for name in NAMED_TOKENS}
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    made = ChatTokenizer(copy, {name: str(token) for name, token in named.items() if token is not None})
    template = getattr(given, "chat_template", None)
    made.chat_template = ChatTemplate(template if isinstance(template, str) else None, made.special_tokens)
    return made


T = TypeVar("T")


def with_bar(items: Iterable[T], total: int, is_shown: bool, console: Console | None = None) -> Iterator[T]:
    """Iterate over the items with a bar that counts those which are done."""
    console = console or Console(stderr=True)
    columns = (TextColumn("Processed requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (is_shown and console.is_terminal)) as progress:
        task = progress.add_task("requests", total=total)
        for item in items:
            yield item
            progress.advance(task)


@contextmanager
def loading(is_shown: bool) -> Iterator[None]:
    """A spinner while the model loads."""
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield
        return
    with console.status("loading the model"):
        yield
