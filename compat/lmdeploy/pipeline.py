"""pipeline: LMDeploy's interface for programs that generate without a server, over compat.llm's LLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.api import EverbatchError
from compat.llm import LLM, LoRARequest, NotHere, ParameterError, RequestError, RequestOutput, SamplingParams
from compat.lmdeploy.configs import ChatTemplateConfig, EngineConfigBase, GenerationConfig
from compat.lmdeploy.sampling import engine_config, sampling_params
from compat.lmdeploy.session import Response, Session
from compat.lmdeploy.template import Template, as_prompt
from compat.lmdeploy.vl import with_pictures

MAX_SESSIONS = 10_000  # that are kept by their numbers; the oldest is forgotten first


def pipeline(
    model_path: str | Path | None = None,
    backend_config: EngineConfigBase | None = None,
    chat_template_config: ChatTemplateConfig | None = None,
    log_level: str = "WARNING",
    max_log_len: int | None = None,
    speculative_config: Any = None,
    **fields: Any,
) -> Pipeline:
    """Load a model. `fields`: single fields of a TurbomindEngineConfig, such as tp=2. `log_level`, `max_log_len`: without effect.

    Raises TypeError for an unknown field, NotHere for what this version does not serve, and ConfigError.
    """
    if speculative_config is not None:
        raise NotHere("speculative_config is not taken here; give compat.llm's LLM a speculative_config")
    if fields.pop("model_name", None) is not None:
        raise NotHere("model_name chooses a chat template by its name; leave it out, or give a ChatTemplateConfig")
    return Pipeline(LLM(model_path, engine_config=engine_config(backend_config, fields)), chat_template_config)


class Pipeline:
    """Any thread may call its methods. End it with `close`, or use it as a context manager."""

    def __init__(self, llm: LLM, chat_template_config: ChatTemplateConfig | None = None) -> None:
        """Over an LLM, which it then owns."""
        self.llm = llm
        self.template = Template(llm, chat_template_config)
        self._sessions: dict[int, Session] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        prompts: Any,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        **fields: Any,
    ) -> Response | list[Response]:
        """The answer to a prompt, or to each of a list, in their order.

        A prompt is a text, a text with pictures (`(text, image)` or `(text, [image, ...])`: PIL images, bytes, paths, data:
        URLs), or a conversation (a list of messages). `do_preprocess` False applies no chat template to texts.
        A request that fails gives a Response with finish_reason `error`, and the others go on.
        """
        asked, is_one = self._asked(prompts, do_preprocess), _is_one(prompts)
        given = self._started(asked, gen_config, adapter_name, fields, streaming=False)
        answers = [_whole(index, output) for index, output in enumerate(given)]
        return answers[0] if is_one else answers

    infer = __call__
    batch_infer = __call__

    def stream_infer(
        self,
        prompts: Any,
        sessions: Any = None,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        stream_response: bool = True,
        session_id: int | None = None,
        **fields: Any,
    ) -> Iterator[Response]:
        """Yield what is new of the answers as it comes; `index` says of which prompt. The last one of each has a finish_reason.

        With a session (`sessions` or `session_id`) a single text is its next turn; a session that is not known begins.
        """
        session = sessions if sessions is not None else session_id
        if session is not None:
            if isinstance(prompts, list):
                raise ParameterError("prompts of a session is a list; give one text, the next message")
            yield from self.turn(self.session_of(session), prompts, _one_config(gen_config), adapter_name=adapter_name)
            return
        asked = self._asked(prompts, do_preprocess)
        outputs = self._started(asked, gen_config, adapter_name, fields, streaming=stream_response)
        try:
            yield from _merged(outputs)
        finally:
            for output in outputs:
                if isinstance(output, RequestOutput) and not output.done:
                    output.abort()

    def session(self, gen_config: GenerationConfig | None = None, session_id: int | None = None) -> Session:
        """A new conversation; `with pipe.session() as session: session("Hi")`. The id of an existing one replaces it."""
        session = Session(self, session_id, gen_config)
        with self._lock:
            while len(self._sessions) >= MAX_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
            self._sessions[session.session_id] = session
        return session

    def session_of(self, given: Any) -> Session:
        """A Session itself, or the one with this number, which begins where there is none. Raises ParameterError."""
        if isinstance(given, Session):
            return given
        if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 1 << 63:
            raise ParameterError(f"session_id is {given!r}"[:100] + "; a Session, or a number from 0 is needed")
        return self._sessions.get(given) or self.session(session_id=given)

    def chat(
        self,
        prompt: Any,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
        adapter_name: str | None = None,
    ) -> Any:
        """The next turn of a session, or of a new one. Returns the session, whose `response` is the answer; with
        `stream_response` an iterator over the pieces of it.
        """
        session = session or self.session(gen_config)
        pieces = session(prompt, gen_config, stream_response=True, adapter_name=adapter_name)
        if stream_response:
            return pieces
        for _ in pieces:
            pass
        return session

    def turn(
        self, session: Session, prompt: Any, gen_config: GenerationConfig | None, adapter_name: str | None = None
    ) -> Iterator[Response]:
        """Yield the pieces of the answer to a session's next message, and take both into its history."""
        if session.running is not None:
            raise ParameterError(f"session {session.session_id} has a turn that is running; wait for it, or stop it")
        asked = self.template.of_messages(session.messages(prompt))
        (output,) = self._started([asked], gen_config, adapter_name, {}, streaming=True)
        whole = Response("", 0, 0)
        session.running = output if isinstance(output, RequestOutput) else None
        try:
            for piece in _merged([output]):
                whole.extend(piece)
                yield piece
        finally:
            session.running = None
            if isinstance(output, RequestOutput) and not output.done:
                output.abort()
            session.response = whole
            if whole.finish_reason != "error":
                session.history.append((prompt, whole.text))
                session.step = whole.input_token_len + whole.generate_token_len

    def stop_session(self, session_id: int | Session) -> None:
        """End the turn that is running in a session; the session stays. Nothing happens where there is none."""
        session = session_id if isinstance(session_id, Session) else self._sessions.get(session_id)
        if session is not None:
            session.stop()

    def end_session(self, session_id: int | Session) -> None:
        """Forget a session."""
        session = session_id if isinstance(session_id, Session) else self._sessions.get(session_id)
        if session is not None:
            session.close()

    def forget(self, session: Session) -> None:
        with self._lock:
            if self._sessions.get(session.session_id) is session:
                del self._sessions[session.session_id]

    def close(self) -> None:
        """End the engine. Answers that are pending fail."""
        self._sessions.clear()
        self.llm.shutdown()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _asked(self, prompts: Any, do_preprocess: bool) -> list[dict[str, Any]]:
        given = [prompts] if _is_one(prompts) else list(prompts)
        return [self._prompt(each, do_preprocess) for each in given]

    def _prompt(self, given: Any, do_preprocess: bool) -> dict[str, Any]:
        if isinstance(given, list) and given and isinstance(given[0], Mapping):
            return self.template.of_messages(given)
        text, pictures = with_pictures(given)
        return self.template.of_text(text, pictures) if do_preprocess else as_prompt(text, pictures)

    def _started(
        self,
        asked: list[dict[str, Any]],
        gen_config: Any,
        adapter_name: str | None,
        fields: dict[str, Any],
        *,
        streaming: bool,
    ) -> list[RequestOutput | EverbatchError]:
        """Begin all requests. An error is that of a request alone; wrong configurations raise for all."""
        if fields:
            raise TypeError(f"{next(iter(fields))!r} is no argument; give its field in a GenerationConfig")
        configs = list(gen_config) if isinstance(gen_config, list | tuple) else [gen_config] * len(asked)
        if len(configs) != len(asked):
            raise ParameterError(
                f"gen_config has {len(configs)} entries for {len(asked)} prompts; give as many, or one"
            )
        params, lora = [self._params(each) for each in configs], self._lora(adapter_name)
        return [self._start(prompt, each, lora, streaming) for prompt, each in zip(asked, params)]

    def _start(
        self, prompt: dict[str, Any], params: SamplingParams, lora: LoRARequest | None, streaming: bool
    ) -> RequestOutput | EverbatchError:
        try:
            return self.llm.generate_async(prompt, params, lora_request=lora, streaming=streaming)
        except EverbatchError as error:
            return error

    def _params(self, config: Any) -> SamplingParams:
        params = sampling_params(config)
        params.stop = [*params.stops(), *self.template.stop_words] or None
        return params

    def _lora(self, name: str | None) -> LoRARequest | None:
        if name is None:
            return None
        known = self.llm.args.config.lora.directories
        if name not in known:
            shown = ", ".join(sorted(known)[:10]) or "none"
            raise ParameterError(f"adapter_name is {name[:80]!r}; known are {shown} (adapters of PytorchEngineConfig)")
        return LoRARequest(name, list(known).index(name) + 1, known[name])


def _is_one(prompts: Any) -> bool:
    """True for a text and for one conversation."""
    return not isinstance(prompts, list) or (bool(prompts) and isinstance(prompts[0], Mapping))


def _one_config(given: Any) -> Any:
    return given[0] if isinstance(given, list) and len(given) == 1 else given


def _whole(index: int, output: RequestOutput | EverbatchError) -> Response:
    if isinstance(output, EverbatchError):
        return _failed(index, output)
    try:
        output.result()
    except RequestError as error:
        return _failed(index, error)
    return _response(index, output, output.outputs[0].text, output.outputs[0].token_ids)


def _merged(outputs: Sequence[RequestOutput | EverbatchError]) -> Iterator[Response]:
    """The pieces of all answers: those of each in their order, of all in turns, so that none waits for another one's end."""
    open_ones = {
        index: (output if isinstance(output, EverbatchError) else iter(output)) for index, output in enumerate(outputs)
    }
    while open_ones:
        for index, source in list(open_ones.items()):
            try:
                if isinstance(source, EverbatchError):
                    raise source
                step = next(source)
            except StopIteration:
                del open_ones[index]
            except EverbatchError as error:
                del open_ones[index]
                yield _failed(index, error)
            else:
                yield _response(index, step, step.outputs[0].text_diff, step.outputs[0].token_ids_diff, is_step=True)


def _response(index: int, output: Any, text: str, token_ids: list[int], is_step: bool = False) -> Response:
    first = output.outputs[0]
    entries = first.logprobs_diff if is_step else first.logprobs
    return Response(
        text,
        len(first.token_ids),
        len(output.prompt_token_ids),
        _reason(first.finish_reason),
        list(token_ids),
        [{token_id: each.logprob for token_id, each in entry.items()} for entry in entries] or None,
        first.generation_logits if output.context_logits is None else output.context_logits,
        index=index,
    )


def _reason(reason: str | None) -> str | None:
    """LMDeploy knows stop and length; an answer that was cut by a time limit or stopped counts as the latter."""
    return reason if reason in (None, "stop") else "length"


def _failed(index: int, error: EverbatchError) -> Response:
    return Response(error.message, 0, 0, "error", index=index)
