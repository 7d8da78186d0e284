"""Malformed requests to generate, generate_stream and infer: what is wrong is in the body, not in the framing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from backend.serving.wires.roles import MODELS
from tests.hostile import json_cases, served, values
from tests.hostile.case import Case, HttpExchange

VERBS = ("generate", "generate", "generate_stream")
Fields = dict[str, str]  # name -> JSON text
FATAL = "http-huge-shape"  # a class of requests that ends tritonserver by itself: sent only when asked for


def base(model: str) -> Fields:
    """A request that is served, as JSON texts by name."""
    if model == served.GATEWAY:
        return dict(json_cases.SERVED["/v1/chat/completions"])
    return fields_of(served.good(model))


def fields_of(row: list[served.Tensor]) -> Fields:
    """The row as JSON texts; one value without a list around it."""
    return {tensor.name: json.dumps(tensor.values if len(tensor.values) > 1 else tensor.values[0]) for tensor in row}


def body(fields: Fields) -> bytes:
    return ("{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in fields.items()) + "}").encode(
        "utf-8", "surrogatepass"
    )


def request(path: str, data: bytes, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    return head.encode("utf-8", "surrogatepass") + data


def post(kind: str, name: str, model: str, data: bytes, verb: str = "generate", leave_after: int | None = None) -> Case:
    """A case of one well-framed POST with this body."""
    pieces = (request(f"/v2/models/{model}/{verb}", data),)
    return Case(kind, f"{verb}: {name}", model, HttpExchange(pieces, leave_after))


def any_input(rng: random.Random, model: str) -> str:
    return rng.choice(MODELS[model].inputs).name


def bad_bytes(rng: random.Random, model: str) -> Case:
    """A body that was valid before some bytes were flipped, cut out or put in; or that never was."""
    data = bytearray(body(base(model)))
    if rng.random() < 0.2:
        data = bytearray(rng.randbytes(rng.choice((0, 1, 7, 100, 3000))))
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(data) + 1)
        change = rng.choice((rng.randbytes(1), b"\0", rng.choice(values.BAD_UTF8), b"", b'"', b"{", b"]", b"\\u"))
        data[place : place + rng.randrange(3)] = change
    return post("http-bytes", "garbled bytes", model, bytes(data), rng.choice(VERBS))


def bad_type(rng: random.Random, model: str) -> Case:
    """One to three inputs whose value is no plain value of their type."""
    fields = base(model)
    names = [rng.choice((any_input(rng, model), rng.choice(list(fields)))) for _ in range(rng.randrange(1, 4))]
    fields.update({name: values.json_oddity(rng) for name in names})
    return post("http-types", f"wrong types of {', '.join(names)}", model, body(fields), rng.choice(VERBS))


def bad_range(rng: random.Random, model: str) -> Case:
    """One to three inputs with numbers of any size, NaN and infinities."""
    fields = base(model)
    names = [any_input(rng, model) for _ in range(rng.randrange(1, 4))]
    fields.update({name: values.json_number(rng) for name in names})
    return post("http-ranges", f"odd numbers in {', '.join(names)}", model, body(fields), rng.choice(VERBS))


def bad_shape(rng: random.Random, model: str) -> Case:
    """Lists where one value is expected, empty lists, lists of lists, lists of up to 100,000 values."""
    fields = base(model)
    name = rng.choice((any_input(rng, model), rng.choice(list(fields))))
    item = rng.choice(("1", "-1", '"a"', "true", "null", "0.5", "[1]", "[]"))
    count = rng.choice((0, 0, 2, 3, 129, 1000, 5000, 100_000))
    fields[name] = "[" + ", ".join([item] * count) + "]"
    return post("http-shapes", f"{name} is a list of {count} times {item}", model, body(fields), rng.choice(VERBS))


def bad_depth(rng: random.Random, model: str) -> Case:
    """Nested lists and objects, far below the depth that Triton's parser survives."""
    depth = rng.choice((10, 17, 100, 1000, 20_000))
    nested = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth))
    name = rng.choice((any_input(rng, model), "parameters", "unknown"))
    if rng.random() < 0.3:
        return post("http-depth", f"{depth} levels without a request", model, nested.encode(), rng.choice(VERBS))
    return post(
        "http-depth", f"{name} has {depth} levels", model, body({**base(model), name: nested}), rng.choice(VERBS)
    )


PARAMETERS = (
    *(
        "timeout",
        "cache_salt",
        "request_type",
        "priority",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "namespace",
    ),
    *(
        "binary_data",
        "binary_data_output",
        "triton_enable_empty_final_response",
        "triton_grpc_error",
        "headers",
        "",
        "a\0b",
    ),
    *("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "binary_data_size", "classification"),
)


def bad_parameter(rng: random.Random, model: str) -> Case:
    """Unknown parameters, known ones with values of other types, an odd object of parameters."""
    fields = base(model)
    name = rng.choice((*PARAMETERS, values.text(rng)))
    value = rng.choice((values.json_oddity(rng), values.json_number(rng), json.dumps(values.text(rng))))
    if rng.random() < 0.4:
        fields["parameters"] = rng.choice((value, f"{{{json.dumps(name)}: {value}}}"))
    else:
        fields[name] = value
    data = body(fields)
    if rng.random() < 0.2:
        data = data[:-1] + b', "cache_salt": "' + rng.choice(values.BAD_UTF8) + b'"}'
    return post("http-parameters", f"parameter {name[:20]!r}", model, data, rng.choice(VERBS))


def bad_id(rng: random.Random, model: str) -> Case:
    """Request ids that are huge, no text, or no UTF-8."""
    ids = (b'"%s"' % rng.choice(values.BAD_UTF8), b'"' + b"i" * rng.choice((1000, 65_536, 300_000)) + b'"')
    odd = rng.choice((*ids, values.json_oddity(rng).encode(), values.json_number(rng).encode()))
    data = body(base(model))[:-1] + b', "id": ' + odd + b"}"
    if rng.random() < 0.3:
        data = data[:-1] + b', "stop": true}'
    return post("http-ids", f"id {odd[:12]!r} of {len(odd)} bytes", model, data, rng.choice(VERBS))


def _message(rng: random.Random) -> str:
    role = rng.choice(
        ('"user"', '"system"', '"\\ud800"', "null", "7", '"' + "r" * 3000 + '"', json.dumps(values.text(rng)))
    )
    content = rng.choice(
        (json.dumps(values.text(rng)), values.json_oddity(rng), values.json_number(rng), "[" * 40 + "]" * 40)
    )
    extra = rng.choice(("", "", f', "name": {values.json_oddity(rng)}', ', "tool_calls": [{"function": {}}]'))
    return f'{{"role": {role}, "content": {content}{extra}}}'


def bad_text(rng: random.Random, model: str) -> Case:
    """Texts, chats, words and biases that a tokenizer or a template may choke on."""
    fields = base(model)
    if model not in served.with_inputs("text_input", "embedding_bias_words"):
        return odd_text_of_any(rng, model)
    pick = rng.randrange(5)
    if pick == 0:
        fields = {
            "text_input": '""',
            "max_tokens": "2",
            "messages": json.dumps("[" + ", ".join(_message(rng) for _ in range(rng.randrange(3))) + "]"),
        }
    elif pick == 1:
        fields[rng.choice(("stop_words", "bad_words"))] = json.dumps(
            [values.text(rng) for _ in range(rng.randrange(6))]
        )
    elif pick == 2:
        words = [values.text(rng) for _ in range(rng.randrange(4))]
        fields |= {
            "embedding_bias_words": json.dumps(words),
            "embedding_bias_weights": f"[{', '.join(values.json_number(rng) for _ in words)}]",
        }
    elif pick == 3:
        fields["text_input"] = json.dumps(values.text(rng) * rng.choice((1, 1, 1, 300)))
    else:
        fields["text_input"] = rng.choice(('"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d"', '"\\u0000"'))
    return post("http-text", f"odd {', '.join(set(fields) - {'max_tokens'})}", model, body(fields), rng.choice(VERBS))


def odd_text_of_any(rng: random.Random, model: str) -> Case:
    """One to three texts of a front, odd, or odd numbers where it takes none."""
    fields, specs = base(model), served.texts_of(model)
    if not specs:
        names = [spec.name for spec in MODELS[model].inputs if spec.dims == (1,)]
        fields |= {name: values.json_number(rng) for name in rng.sample(names, min(2, len(names)))}
        return post("http-text", "odd numbers beside tokens", model, body(fields), rng.choice(VERBS))
    names = [rng.choice(specs).name for _ in range(rng.randrange(1, 4))]
    for name in names:
        word = json.dumps(values.text(rng) * rng.choice((1, 1, 300)))
        fields[name] = rng.choice((word, f"[{word}, {word}]", '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"'))
    return post("http-text", f"odd {', '.join(names)}", model, body(fields), rng.choice(VERBS))


def odd_json(rng: random.Random, model: str) -> Case:
    """A JSON text in a tensor that is odd; or, for vLLM, its fields as parameters of the request."""
    data = json_cases.request_text(rng, model)
    fields, verb = base(model), rng.choice(VERBS)
    if model == "vllm" and rng.random() < 0.4:
        inner = data.removeprefix(b"{")
        return post("http-json", "parameters", model, b'{"text_input": "a", ' + inner, verb)
    fields[served.WITH_JSON[model]] = json.dumps(data.decode("utf-8", "surrogateescape"))
    return post("http-json", f"{data[:24]!r}", model, body(fields), verb)


REFUSED = (
    *(
        '"n": 5',
        '"best_of": 100000',
        '"num_return_sequences": 1000000',
        '"beam_width": 2147483647',
        '"logit_bias": {"1": 1e308}',
    ),
    *('"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(((((a+)+)+)+)+$"', '"use_beam_search": true'),
    *(
        '"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{\\"$ref\\": \\"#\\"}"',
        '"prompt_logprobs": 100000',
    ),
    *(
        '"return_context_logits": true',
        '"lora_task_id": 18446744073709551615',
        '"logprobs": 1e9',
        '"echo": true',
        '"suffix": "x"',
    ),
    *(
        '"response_format": {"type": "json_object"}',
        '"tools": [{}]',
        '"model": "' + "../" * 30 + '"',
        '"lora_path": "../../.."',
    ),
    *(
        '"trust_remote_code": true',
        '"chat_template": "{{ cycler.__init__.__globals__ }}"',
        '"truncate_prompt_tokens": -1',
    ),
)


def refused(rng: random.Random, model: str) -> Case:
    """Fields of features that other servers have, or had holes in."""
    field = rng.choice(REFUSED)
    data = body(base(model))[:-1] + b", " + field.encode() + b"}"
    return post("http-refused", field[:40], model, data, rng.choice(VERBS))


def odd_session(rng: random.Random, model: str) -> Case:
    """Sessions with flags that contradict each other, of a few ids, so that they meet."""
    fields = base(model)
    fields["CORRID"] = str(rng.choice((1, 2, 3, 4, 0, -1, 2**64 - 1, 2**64)))
    for name in rng.sample(
        ("START", "END", "STOP", "step", "session_len", "session_full_history"), rng.randrange(1, 5)
    ):
        fields[name] = rng.choice(("0", "1", "-1", "2", "2147483647", "true", "null", str(rng.randrange(40))))
    return post("http-sessions", "odd flags of a session", model, body(fields), rng.choice(VERBS))


def left(rng: random.Random, model: str) -> Case:
    """A stream whose client leaves, at once or midway."""
    fields = fields_of(served.streamed(model, rng.choice((20, 200))))
    return post("http-left", "the client leaves", model, body(fields), "generate_stream", rng.choice((0, 1, 100, 900)))


def infer(rng: random.Random, model: str) -> Case:
    """/infer with odd tensors, sizes and binary parts. A decoupled model refuses it, but only after it was parsed."""
    tensors = [_whole(model, tensor) for tensor in served.good(model)]
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        odd = _odd_tensor(rng, model)
        same = [place for place, tensor in enumerate(tensors) if tensor["name"] == odd["name"]]
        if same and rng.random() < 0.7:
            tensors[same[0]] |= dict(rng.sample(list(odd.items()), rng.randrange(1, len(odd) + 1)))
        else:
            tensors.append(odd)
    outputs = rng.choice(([], [], [{}], [{"name": "x"}], [{"name": MODELS[model].outputs[0].name}] * 2))
    data = json.dumps({"id": values.text(rng), "inputs": tensors, "outputs": outputs})
    binary = rng.randbytes(rng.choice((0, 0, 4, 40)))
    length = rng.choice((len(data), len(data), 0, -1, len(data) + 1000, 2**40, "x"))
    header = rng.choice(("", "", f"Inference-Header-Content-Length: {length}\r\n"))
    pieces = (request(f"/v2/models/{model}/infer", data.encode() + binary, header),)
    return Case("http-infer", f"infer: {[tensor['name'] for tensor in tensors]}", model, HttpExchange(pieces))


def huge_shape(rng: random.Random, model: str) -> Case:
    """A tensor of JSON values whose shape asks for more memory than there is: fatal to tritonserver 24.10 where the model
    is unary.
    """
    tensors = [_whole(model, tensor) for tensor in served.good(model)]
    tensors[-1]["shape"] = rng.choice(([2**63], [2**40], [2**62, 4]))
    pieces = (request(f"/v2/models/{model}/infer", json.dumps({"inputs": tensors}).encode()),)
    return Case(FATAL, f"infer: a shape of {tensors[-1]['shape']}", model, HttpExchange(pieces))


def _whole(model: str, tensor: served.Tensor) -> dict[str, Any]:
    spec, batch = MODELS[model].by_name()[tensor.name], [1] if MODELS[model].batched else []
    dtype = "BYTES" if spec.dtype == "STRING" else spec.dtype
    return {"name": tensor.name, "datatype": dtype, "shape": [*batch, *tensor.dims], "data": list(tensor.values)}


def _odd_tensor(rng: random.Random, model: str) -> dict[str, Any]:
    """A tensor of which nothing need be right."""
    name = any_input(rng, model)
    tensor = {
        "name": rng.choice((name, name, name, "unknown", "")),
        "datatype": rng.choice((*values.PACK, "BYTES", "BF16", "NONE", "")),
        "shape": rng.choice(([1, 1], [1], [], [-1, 1], [0], [1, 3], ["1"], [1, 0], [1, 1, 1], [2**64], [1000, 1000])),
        "data": rng.choice(([1], [], ["a"], [[1]], [None], [1.5], 7, "x", [2**40], [-1], [True], ["\ud800"])),
    }
    tensor["parameters"] = rng.choice(
        (
            {},
            {},
            {"binary_data_size": rng.choice((-1, 0, 4, 2**31, 2**63 - 1, "4"))},
            {
                "shared_memory_region": "r",
                "shared_memory_byte_size": rng.choice((0, 4, 2**62)),
                "shared_memory_offset": 2**62,
            },
        )
    )
    if rng.random() < 0.2:
        del tensor["data"]
    return tensor


KINDS: dict[str, Callable[[random.Random, str], Case]] = {
    "http-bytes": bad_bytes,
    "http-types": bad_type,
    "http-ranges": bad_range,
    "http-shapes": bad_shape,
    "http-depth": bad_depth,
    "http-parameters": bad_parameter,
    "http-ids": bad_id,
    "http-text": bad_text,
    "http-refused": refused,
    "http-sessions": odd_session,
    "http-left": left,
    "http-infer": infer,
    "http-json": odd_json,
}
# Which fronts a class of requests makes sense for; all where it is not named.
ONLY = {
    "http-sessions": served.WITH_SESSIONS,
    "http-left": served.GENERATING,
    "http-json": tuple(served.WITH_JSON),
}
