"""JSON texts for whatever reads JSON objects: the tensors `request` and `sampling_parameters`, and the OpenAI endpoint.

A text is an object that is served, with odd values under known names, unknown and doubled names, or what is no object at all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from backend.serving.wires.everbatch import Generate
from backend.serving.wires.vllm_sampling import VllmSampling
from gateway.anthropic_messages import CountTokensRequest, MessagesRequest
from gateway.infill_messages import InfillRequest
from gateway.interactive_messages import EncodeRequest, InteractiveRequest
from gateway.messages import ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter
from gateway.ollama_messages import OllamaChat, OllamaEmbed, OllamaGenerate, OllamaShow
from gateway.response_messages import NewConversation, ResponseRequest
from gateway.token_messages import DetokenizeRequest, TokenizeRequest
from gateway.vector_messages import EmbeddingRequest, RerankRequest
from tests.hostile import values

Fields = dict[str, str]  # name -> JSON text
_THREE = '{"num_predict": 3}'

# What is served: by the front, or by the path of the OpenAI endpoint.
SERVED: dict[str, Fields] = {
    "everbatch": {"prompt": '"a = "', "max_tokens": "3", "temperature": "0"},
    "vllm": {"max_tokens": "3", "temperature": "0"},
    "/v1/chat/completions": {
        "model": '"everbatch"',
        "messages": '[{"role": "user", "content": "a"}]',
        "max_tokens": "3",
    },
    "/v1/completions": {"model": '"everbatch"', "prompt": '"a = "', "max_tokens": "3"},
    "/v1/responses": {"model": '"everbatch"', "input": '"a = "', "max_output_tokens": "3"},
    "/v1/messages": {
        "model": '"everbatch"',
        "messages": '[{"role": "user", "content": "a"}]',
        "max_tokens": "3",
    },
    "/v1/embeddings": {"model": '"everbatch"', "input": '"a = "'},
    "/v1/rerank": {"model": '"everbatch"', "query": '"a"', "documents": '["b"]'},
    "/v1/messages/count_tokens": {"model": '"everbatch"', "messages": '[{"role": "user", "content": "a"}]'},
    "/v1/chat/interactive": {"prompt": '"a = "', "request_output_len": "3"},
    "/v1/encode": {"input": '"a = "'},
    "/tokenize": {"model": '"everbatch"', "prompt": '"a = "'},
    "/detokenize": {"model": '"everbatch"', "tokens": "[5]"},
    "/v1/conversations": {"items": '[{"role": "user", "content": "a"}]'},
    "/infill": {"input_prefix": '"a = "', "n_predict": "3"},
    "/api/chat": {"model": '"everbatch"', "messages": '[{"role": "user", "content": "a"}]', "options": _THREE},
    "/api/generate": {"model": '"everbatch"', "prompt": '"a = "', "options": _THREE},
    "/api/embed": {"model": '"everbatch"', "input": '"a = "'},
    "/api/show": {"model": '"everbatch"'},
    "/v1/load_lora_adapter": {"lora_name": '"doll"', "lora_path": '"doll"'},
    "/v1/unload_lora_adapter": {"lora_name": '"doll"'},
}
NAMES: dict[str, tuple[str, ...]] = {
    "everbatch": Generate.__struct_fields__,
    "vllm": VllmSampling.__struct_fields__,
    "/v1/chat/completions": tuple(ChatRequest.model_fields),
    "/v1/completions": tuple(CompletionRequest.model_fields),
    "/v1/responses": tuple(ResponseRequest.model_fields),
    "/v1/messages": tuple(MessagesRequest.model_fields),
    "/v1/embeddings": tuple(EmbeddingRequest.model_fields),
    "/v1/rerank": tuple(RerankRequest.model_fields),
    "/v1/messages/count_tokens": tuple(CountTokensRequest.model_fields),
    "/v1/chat/interactive": tuple(InteractiveRequest.model_fields),
    "/v1/encode": tuple(EncodeRequest.model_fields),
    "/tokenize": tuple(TokenizeRequest.model_fields),
    "/detokenize": tuple(DetokenizeRequest.model_fields),
    "/v1/conversations": tuple(NewConversation.model_fields),
    "/infill": tuple(InfillRequest.model_fields),
    "/api/chat": tuple(OllamaChat.model_fields),
    "/api/generate": tuple(OllamaGenerate.model_fields),
    "/api/embed": tuple(OllamaEmbed.model_fields),
    "/api/show": tuple(OllamaShow.model_fields),
    "/v1/load_lora_adapter": tuple(LoadAdapter.model_fields),
    "/v1/unload_lora_adapter": tuple(UnloadAdapter.model_fields),
}
# Values that are nearly right, under the names that they are for. What is under "" fits every name.
NEARLY: dict[str, tuple[str, ...]] = {
    "": ("[0.5]", "{}", "[[]]", '"1"', "-1", "0", "18446744073709551616", "1e400", "-0.0", "true", '"true"', "null"),
    "stop": ('[""]', '["a", 1]', '"' + "s" * 20_000 + '"', json.dumps(["w"] * 2000), '["\\ud800"]', '"\\u0000"'),
    "bad_words": ('[""]', json.dumps(["w"] * 2000), '["\\udfff"]', '[" "]', '["' + "x" * 9000 + '"]'),
    "stop_token_ids": ("[-1]", "[4294967296]", "[9223372036854775808]", "[1.0]", json.dumps([1] * 5000), "[null]"),
    "prompt_token_ids": ("[]", "[-1]", "[99999999]", "[18446744073709551615]", json.dumps([5] * 100_000), '["5"]'),
    "prompt": (
        '""',
        '"\\ud800"',
        '"\\u0000"',
        "[[]]",
        "[[5, 6], [7]]",
        '["a", [5]]',
        "[true]",
        json.dumps("ab " * 9000),
    ),
    "input": ('""', '"\\ud800"', "[]", '[{"role": "user", "content": []}]', '[{"type": "reasoning"}]', "[[]]"),
    "messages": (
        *(
            "[]",
            "[{}]",
            '[{"role": "user"}]',
            '[{"role": "tool", "content": "a"}]',
            '[{"role": "user", "content": []}]',
        ),
        *('[{"role": "user", "content": "\\ud800"}]', '[{"role": "assistant", "content": null}]', '[{"role": 1}]'),
        *(
            '[{"role": "user", "content": [{"type": "image", "source": {}}]}]',
            '[{"role": "assistant", "content": "a"}]',
        ),
        *(
            '[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": 5}]}]}]',
            json.dumps([{"role": "user", "content": [{"type": "text", "text": "a"}] * 3000}]),
        ),
        *('[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]',),
        *(json.dumps([{"role": "user", "content": "a"}] * 3000), '[{"role": "user", "content": {"a": 1}}]'),
        *('[{"role": "user", "content": "a", "name": "' + "n" * 9000 + '"}]', '[{"role": "\\ud800", "content": "a"}]'),
    ),
    "session_id": ("-1", "-2", "0", "9223372036854775807", "9223372036854775808", "1e3", "true"),
    "options": ("[]", '{"num_predict": -3}', '{"temperature": 1e400}', '{"a": {}}', '{"stop": [""]}', "{}", '"a"'),
    "fill": ('{"prefix": "a"}', '{"prefix": "\\ud800", "suffix": ""}', '{"prefix": "", "suffix": "", "files": [{}]}'),
    "format": ('"xml"', '{"type": 5}', '{"$ref": "#"}', "[]", '{"pattern": "(a*)*"}'),
    "images": ('[""]', '["@@"]', "[[]]", json.dumps(["AAAA"] * 100)),
    "input_extra": (
        "[{}]",
        '[{"text": 5}]',
        json.dumps([{"text": "a"}] * 1025),
        '[{"text": "", "filename": "\\ud800"}]',
    ),
    "response_fields": ('["content/a/b"]', "[[]]", json.dumps(["a"] * 200)),
    "request_output_len": ("0", "-1", "2147483647", "2147483648"),
    "system": ('""', '[{"type": "text", "text": "\\u0000"}]', '[{"type": "image"}]', '"\\ud800"'),
    "tokens": ("[]", "[-1]", "[99999999]", "[18446744073709551615]", json.dumps([5] * 100_000)),
    "logit_bias": (
        '{"1": NaN}',
        '{"-1": 1}',
        '{"x": 1}',
        '{"99999999999": 1}',
        '{"1": 1e39}',
        '{"1": 101}',
        '{" 1": 1}',
    ),
    "logprobs": ("true", "-1", "21", "2147483648"),
    "top_logprobs": ("-1", "21", "5"),
    "temperature": ("-1", "1e-300", "1e308", "2.1", "0.0000001"),
    "top_p": ("-0.1", "1.1", "1e-300", "0"),
    "top_k": ("-2", "2147483648", "0"),
    "seed": ("-1", "18446744073709551615", "18446744073709551616", "-9223372036854775809", "1.5"),
    "n": ("0", "129", "128", "-1"),
    "best_of": ("0", "2", "100000"),
    "use_beam_search": ("true", "1"),
    "length_penalty": ("-51", "1e308", "NaN", "0", "-1"),
    "early_stopping": ('"never"', '"ever"', "2", "true"),
    "max_tokens": ("0", "-1", "2147483647", "2147483648", "9223372036854775808", "1e3", "3000"),
    "max_output_tokens": ("0", "-1", "2147483647", "2147483648"),
    "min_tokens": ("-1", "100", "2147483648"),
    "timeout_s": ("-1", "0", "1e-9", "1e308", "NaN"),
    "repetition_penalty": ("0", "-1", "1e-40", "1e308"),
    "previous_response_id": ('"resp_nobody"', '""', '"../.."', '"' + "r" * 5000 + '"', '"\\u0000"'),
    "metadata": ('{"a": 1}', json.dumps({str(n): "v" for n in range(17)}), "[]"),
    "stream_options": ("{}", '{"include_usage": 1}', '{"x": 1}', '{"include_usage": true}'),
    "response_format": ('{"type": "json_object"}', '{"type": 1}', "{}", '"text"'),
    "model": ('"nothing"', '""', '"' + "m" * 9000 + '"', '"../everbatch"', '"\\ud800"'),
    "tools": ("[{}]", "[]", '[{"type": "function"}]'),
    "include": ('["message.output_text.logprobs"]', '["x"]', '"x"'),
    "guided_decoding": ('{"regex": "(a+)+$"}', '"x"', "{}"),
    "lora_name": ('"x"', '"../.."', "null"),
    "dimensions": ("0", "-1", "257", "2147483647", "1e308", "NaN", "1.5"),
    "documents": (
        "[]",
        '[""]',
        "[{}]",
        '[{"text": 1}]',
        json.dumps(["a"] * 3000),
        '["\\ud800"]',
        json.dumps(["ab " * 9000]),
    ),
    "query": ('""', '"\\ud800"', json.dumps("ab " * 9000), "[]"),
    "top_n": ("0", "-1", "2147483648"),
    "truncate_prompt_tokens": ("1", "-1", "null"),
    "prompt_logprobs": ("1", "true", "false", "100000"),
}


def object_text(fields: Fields) -> bytes:
    text = ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields.items())
    return f"{{{text}}}".encode("utf-8", "surrogatepass")


def odd_value(rng: random.Random, name: str) -> str:
    """Mostly a value that is nearly right for this name, else any value."""
    pick = rng.random()
    if pick < 0.5 and name in NEARLY:
        return rng.choice(NEARLY[name])
    if pick < 0.65:
        return rng.choice(NEARLY[""])
    if pick < 0.8:
        return values.json_oddity(rng)
    return values.json_number(rng) if pick < 0.9 else json.dumps(values.text(rng))


def request_text(rng: random.Random, what: str) -> bytes:
    """One text for a front or path of SERVED."""
    pick = rng.random()
    if pick < 0.6:
        names = [rng.choice(NAMES[what]) for _ in range(rng.randrange(1, 4))]
        return object_text(SERVED[what] | {name: odd_value(rng, name) for name in names})
    if pick < 0.8:
        return _structure(rng, what)
    return _garbled(rng, object_text(SERVED[what]))


def _structure(rng: random.Random, what: str) -> bytes:
    """Doubled and unknown names, contradictions, depth, numbers of keys, missing names, and other JSON than an object."""
    fields = SERVED[what]
    whole = object_text(fields)
    name = rng.choice(NAMES[what])
    depth = rng.choice((10, 100, 1000, 20_000))
    nest = rng.choice(
        (lambda: "[" * depth + "]" * depth, lambda: '{"a":' * depth + "1" + "}" * depth, lambda: "[" * depth)
    )
    left_out, number = rng.choice(list(fields)), rng.choice((1, 20_000))
    ways: tuple[Callable[[], bytes], ...] = (  # Each is made only when it is chosen, because some are large.
        lambda: whole[:-1] + f', "{name}": {odd_value(rng, name)}, "{name}": {odd_value(rng, name)}}}'.encode(),
        lambda: object_text(fields | {values.text(rng): values.json_oddity(rng)}),
        lambda: object_text({key: value for key, value in fields.items() if key != left_out}),
        lambda: object_text(fields | {"prompt": '"a"', "prompt_token_ids": "[5]", "messages": "[]"}),
        lambda: object_text(fields | {"min_tokens": "9", "max_tokens": "2", "best_of": "1", "n": "3"}),
        lambda: object_text(fields | {name: nest()}),
        lambda: object_text(fields | {f"k{n}": "1" for n in range(number)}),
        lambda: nest().encode(),
        lambda: values.json_oddity(rng).encode(),
        lambda: b"[" + whole + b"]",
        lambda: whole + whole,
        lambda: b"\xef\xbb\xbf" + whole,
        lambda: b"",
        lambda: b" " * 200_000 + whole,
    )
    return rng.choice(ways)()


def _garbled(rng: random.Random, data: bytes) -> bytes:
    """The bytes with some flipped, cut out or put in."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(changed) + 1)
        piece = rng.choice(
            (rng.randbytes(1), b"\0", rng.choice(values.BAD_UTF8), b"", b'"', b"{", b"]", b"\\u", b"\\ud800")
        )
        changed[place : place + rng.randrange(3)] = piece
    return bytes(changed)
