"""GGUF files that must be refused: a sound one of the tiny model, written by hand, and ways to spoil it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from tests.model.hostile.base import WORDS, Case

UINT8, UINT16, UINT32, INT32, FLOAT32, BOOL, TEXT, ARRAY, UINT64 = 0, 2, 4, 5, 6, 7, 8, 9, 10
F32, Q8_0 = 0, 8
NAME = "model.gguf"
_FORMS = {UINT8: "<B", UINT16: "<H", UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<B", UINT64: "<Q"}
LETTERS = [*WORDS, "ab", "cd", "ef", "gh"]  # 32 tokens, as the model has
TOKENIZER = "tokenizer.ggml."


class Tensor:
    """`offset` is where the header says that it lies; None: where it does."""

    def __init__(self, shape: tuple[int, ...], kind: int = F32, content: bytes | None = None) -> None:
        self.shape, self.kind = shape, kind
        self.content = struct.pack("<f", 0.01) * prod(shape) if content is None else content
        self.offset: int | None = None


@dataclass
class Gguf:
    settings: dict[str, tuple[int, Any]]
    tensors: dict[str, Tensor]
    version: int = 3
    magic: bytes = b"GGUF"
    num_tensors: int | None = None  # what the file says of them, if not the truth
    num_settings: int | None = None
    again: list[tuple[str, tuple[int, Any]]] = field(default_factory=list)  # settings behind the others

    def content(self) -> bytes:
        settings = [*self.settings.items(), *self.again]
        counts = [len(self.tensors) if self.num_tensors is None else self.num_tensors]
        counts.append(len(settings) if self.num_settings is None else self.num_settings)
        header = self.magic + struct.pack("<IQQ", self.version, *counts)
        for key, (kind, value) in settings:
            header += text(key) + struct.pack("<I", kind) + encoded(kind, value)
        data = b""
        for name, tensor in self.tensors.items():
            offset = len(data) if tensor.offset is None else tensor.offset
            header += text(name) + struct.pack("<I", len(tensor.shape))
            header += b"".join(struct.pack("<Q", size) for size in tensor.shape)
            header += struct.pack("<IQ", tensor.kind, offset)
            data += tensor.content + bytes(-len(tensor.content) % 32)
        return header + bytes(-len(header) % 32) + data


def text(content: str | bytes) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(raw)) + raw


def encoded(kind: int, value: Any) -> bytes:
    """Bytes are taken as they are. An array is (type, values), or (type, values, the count that it says)."""
    if isinstance(value, bytes):
        return value
    if kind == TEXT:
        return text(value)
    if kind == ARRAY:
        of, values, *count = value
        head = struct.pack("<IQ", of, count[0] if count else len(values))
        return head + b"".join(encoded(of, each) for each in values)
    return struct.pack(_FORMS[kind], value)


def sound() -> Gguf:
    """One that both readers take."""
    sizes = dict(context_length=64, embedding_length=64, block_count=1, feed_forward_length=64)
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 32}
    settings: dict[str, tuple[int, Any]] = {"general.architecture": (TEXT, "llama")}
    settings |= {f"llama.{key}": (UINT32, value) for key, value in sizes.items()}
    settings["llama.attention.layer_norm_rms_epsilon"] = (FLOAT32, 1e-6)
    settings |= {
        TOKENIZER + "model": (TEXT, "llama"),
        TOKENIZER + "tokens": (ARRAY, (TEXT, LETTERS)),
        TOKENIZER + "scores": (ARRAY, (FLOAT32, [0.0] * 32)),
        TOKENIZER + "token_type": (ARRAY, (INT32, [2, 3, *[1] * 30])),
        TOKENIZER + "eos_token_id": (UINT32, 1),
        "tokenizer.chat_template": (TEXT, "{% for message in messages %}{{ message.content }}{% endfor %}"),
    }
    layer = dict(
        attn_norm=(64,), ffn_norm=(64,), attn_q=(64, 64), attn_k=(64, 32), attn_v=(64, 32), attn_output=(64, 64)
    )
    layer |= dict(ffn_gate=(64, 64), ffn_up=(64, 64), ffn_down=(64, 64))
    shapes = {"token_embd.weight": (64, 32), "output_norm.weight": (64,)}
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    return Gguf(settings, {name: Tensor(shape) for name, shape in shapes.items()})


def file(change: Callable[[Gguf], object], name: str = NAME) -> Callable[[Path], None]:
    """The file in the place of the checkpoint, with something changed."""

    def spoil(directory: Path) -> None:
        made = sound()
        change(made)
        raw(lambda content: made.content(), name)(directory)

    return spoil


def raw(make: Callable[[bytes], bytes], name: str = NAME) -> Callable[[Path], None]:
    """The same, made of the bytes of the sound one."""

    def spoil(directory: Path) -> None:
        for path in directory.iterdir():
            path.unlink()
        (directory / name).write_bytes(make(sound().content()))

    return spoil


def setting(key: str, kind: int, value: Any) -> Callable[[Path], None]:
    return file(lambda made: made.settings.update({key: (kind, value)}))


def without(key: str) -> Callable[[Path], None]:
    return file(lambda made: made.settings.pop(key))


def tensor(name: str, shape: tuple[int, ...], kind: int = F32, content: bytes | None = None) -> Callable[[Path], None]:
    return file(lambda made: made.tensors.update({name: Tensor(shape, kind, content)}))


def number(name: str, value: int) -> Callable[[Path], None]:
    return file(lambda made: setattr(made, name, value))


def moved(name: str, offset: int) -> Callable[[Path], None]:
    return file(lambda made: setattr(made.tensors[name], "offset", offset))


def unigram(key: str, values: tuple[int, list[int]]) -> Callable[[Path], None]:
    given = {TOKENIZER + "model": (TEXT, "t5"), TOKENIZER + key: (ARRAY, values)}
    return file(lambda made: made.settings.update(given))


def _charsmap(content: bytes) -> Callable[[Path], None]:
    return unigram("precompiled_charsmap", (UINT8, list(content)))


def _truncated_by(count: int) -> Callable[[Path], None]:
    return raw(lambda content: content[:-count])


def _two_files(directory: Path) -> None:
    raw(lambda content: content)(directory)
    (directory / "other.gguf").write_bytes(sound().content())


def _leads_out(directory: Path) -> None:
    raw(lambda content: content)(directory)
    (directory / NAME).rename(directory.parent / "outside.gguf")
    (directory / NAME).symlink_to("../outside.gguf")


_NAN = struct.pack("<e", float("nan")) + bytes(32)
_DOWN = "blk.0.ffn_down.weight"
_HUGE = 1 << 62
_LEADS_OUT = struct.pack("<II", 1024, 0x7FFFFC00) + bytes(1020) + b" \0"
_NAN_SCORES = setting(TOKENIZER + "scores", ARRAY, (FLOAT32, [*[0.0] * 31, float("nan")]))
_ROPE = "rope_freqs.weight"
_FEW = (ARRAY, (INT32, [1]))
CASES = [
    Case("gguf: no GGUF file", raw(lambda content: b"GGML" + content[4:]), (NAME, "does not begin with GGUF")),
    Case("gguf: empty", raw(lambda content: b""), (NAME, "does not begin with GGUF")),
    Case("gguf: version 1", number("version", 1), (NAME, "version 1", "2 and 3")),
    Case("gguf: big-endian", number("version", 3 << 24), (NAME, "big-endian", "convert")),
    Case("gguf: 2^62 tensors", number("num_tensors", _HUGE), (NAME, str(_HUGE), "tensors")),
    Case("gguf: 2^62 settings", number("num_settings", _HUGE), (NAME, str(_HUGE), "settings")),
    Case("gguf: a tensor more than there are", number("num_tensors", 60), (NAME, "fetch it again")),
    Case("gguf: cut in the header", raw(lambda content: content[:300]), (NAME, "cut short")),
    Case("gguf: cut in the data", _truncated_by(4000), (NAME, "cut short")),
    Case("gguf: a text of 2^62 bytes", setting("a", TEXT, struct.pack("<Q", _HUGE)), (NAME, "setting a", str(_HUGE))),
    Case("gguf: an array of 2^62 texts", setting("a", ARRAY, (TEXT, [], _HUGE)), (NAME, "setting a", str(_HUGE))),
    Case("gguf: an array of 2^62 numbers", setting("a", ARRAY, (UINT32, [], _HUGE)), (NAME, "setting a", str(_HUGE))),
    Case(
        "gguf: an array of arrays",
        setting("a", ARRAY, (ARRAY, [(UINT32, [1])])),
        (NAME, "setting a", "array of type 9"),
    ),
    Case("gguf: a setting of no type", setting("a", 99, b""), (NAME, "setting a", "type 99")),
    Case("gguf: a bool of 7", setting("a", BOOL, 7), (NAME, "setting a", "7")),
    Case("gguf: a text that is not UTF-8", setting("a", TEXT, text(b"x\xff")), (NAME, "setting a", "UTF-8 at byte 1")),
    Case(
        "gguf: a setting twice",
        file(lambda made: made.again.append(("llama.block_count", (UINT32, 1)))),
        (NAME, "llama.block_count", "twice"),
    ),
    Case("gguf: alignment 0", setting("general.alignment", UINT32, 0), (NAME, "general.alignment is 0")),
    Case("gguf: alignment 48", setting("general.alignment", UINT32, 48), (NAME, "general.alignment is 48")),
    Case("gguf: alignment of a gigabyte", setting("general.alignment", UINT32, 1 << 30), (NAME, "general.alignment")),
    Case("gguf: a part of several", setting("split.count", UINT32, 3), (NAME, "3 parts", "-00001-of-00003.gguf")),
    Case("gguf: two files", _two_files, ("2 models in GGUF files", "give the path")),
    Case("gguf: the file leads out", _leads_out, (NAME, "link out")),
    Case("gguf: a tensor of no dimension", tensor(_DOWN, ()), (NAME, _DOWN, "0 dimensions")),
    Case("gguf: a tensor of five", tensor(_DOWN, (64, 64, 1, 1, 1)), (NAME, _DOWN, "5 dimensions")),
    Case("gguf: a tensor of 2^40 rows", tensor(_DOWN, (64, 1 << 40), content=b""), (NAME, "cut short")),
    Case("gguf: a shape that overflows", tensor(_DOWN, (1 << 63, 1 << 63), content=b""), (NAME, "cut short")),
    Case("gguf: a shape with a zero", tensor(_DOWN, (64, 0), content=b""), (NAME, _DOWN, "[0, 64]")),
    Case("gguf: half a block", tensor(_DOWN, (48, 64), Q8_0, bytes(51 * 64)), (NAME, _DOWN, "multiple of 32")),
    Case("gguf: IQ1_S", tensor(_DOWN, (256, 64), 19, b""), (NAME, _DOWN, "IQ1_S", "Q4_K", "Q8_0")),
    Case("gguf: NVFP4", tensor(_DOWN, (64, 64), 40, b""), (NAME, _DOWN, "NVFP4", "Q4_K")),
    Case("gguf: a tensor of no type", tensor(_DOWN, (64, 64), 777, b""), (NAME, _DOWN, "777")),
    Case("gguf: a tensor over the one before", moved(_DOWN, 0), (NAME, _DOWN, "starts at 0")),
    Case("gguf: a tensor beyond the file", moved(_DOWN, 1 << 60), (NAME, _DOWN, str(1 << 60))),
    Case("gguf: another shape", tensor(_DOWN, (64, 32)), (NAME, _DOWN, "[32, 64]", "[64, 64]")),
    Case("gguf: quantised norm", tensor("output_norm.weight", (64,), Q8_0, bytes(68)), (NAME, "output_norm", "Q8_0")),
    Case("gguf: scales that are NaN", tensor(_DOWN, (64, 64), Q8_0, (_NAN * 128)), (NAME, _DOWN, "not finite")),
    Case("gguf: a tensor too few", file(lambda made: made.tensors.pop(_DOWN)), (NAME, "lacks the tensor " + _DOWN)),
    Case("gguf: no embedding", file(lambda made: made.tensors.pop("token_embd.weight")), (NAME, "token_embd.weight")),
    Case("gguf: a tensor too many", tensor("blk.0.ffn_gate_exps.weight", (64, 64)), (NAME, "ffn_gate_exps")),
    Case("gguf: rope factors of NaN", tensor(_ROPE, (16,), content=b"\xff" * 64), (NAME, _ROPE)),
    Case("gguf: rope factors too few", tensor(_ROPE, (8,)), (NAME, "32", _ROPE + " has 8")),
    Case(
        "gguf: another architecture", setting("general.architecture", TEXT, "mamba"), (NAME, "mamba", "llama, mistral3")
    ),
    Case("gguf: architecture is a number", setting("general.architecture", UINT32, 1), (NAME, "general.architecture")),
    Case("gguf: no architecture", without("general.architecture"), (NAME, "general.architecture")),
    Case("gguf: no layers", setting("llama.block_count", UINT32, 0), (NAME, "llama.block_count is 0")),
    Case("gguf: 2^31 layers", setting("llama.block_count", UINT32, 1 << 31), (NAME, "llama.block_count")),
    Case("gguf: layers as text", setting("llama.block_count", TEXT, "1"), (NAME, "llama.block_count")),
    Case(
        "gguf: heads by layer",
        setting("llama.attention.head_count", ARRAY, (INT32, [4, 2])),
        (NAME, "llama.attention.head_count"),
    ),
    Case("gguf: 3 KV heads of 2", setting("llama.attention.head_count_kv", UINT32, 3), (NAME, "head_count_kv")),
    Case("gguf: no width", without("llama.embedding_length"), (NAME, "lacks the setting llama.embedding_length")),
    Case(
        "gguf: a width of 2^40",
        setting("llama.embedding_length", UINT64, 1 << 40),
        (NAME, "llama.attention.key_length"),
    ),
    Case(
        "gguf: eps is NaN", setting("llama.attention.layer_norm_rms_epsilon", FLOAT32, float("nan")), (NAME, "epsilon")
    ),
    Case(
        "gguf: half rotary", setting("llama.rope.dimension_count", UINT32, 16), (NAME, "partial_rotary_factor is 0.5")
    ),
    Case(
        "gguf: yarn",
        setting("llama.rope.scaling.type", TEXT, "yarn"),
        (NAME, "llama.rope.scaling.original_context_length"),
    ),
    Case(
        "gguf: experts", setting("llama.expert_count", UINT32, 8), (NAME, "lacks the setting llama.expert_used_count")
    ),
    Case("gguf: eos beyond the vocabulary", setting(TOKENIZER + "eos_token_id", UINT32, 32), (NAME, "eos_token_id 32")),
    Case(
        "gguf: a token more than the embedding has rows",
        setting(TOKENIZER + "tokens", ARRAY, (TEXT, [*LETTERS, "x"])),
        (NAME, "33 entries", "32 rows"),
    ),
    Case("gguf: no tokenizer", without(TOKENIZER + "model"), (NAME, TOKENIZER + "model"), "text"),
    Case(
        "gguf: another tokenizer",
        setting(TOKENIZER + "model", TEXT, "rwkv"),
        (NAME, "rwkv", "gpt2, gemma4, llama"),
        "text",
    ),
    Case("gguf: no tokens", without(TOKENIZER + "tokens"), (NAME, TOKENIZER + "tokens"), "text"),
    Case("gguf: tokens are numbers", setting(TOKENIZER + "tokens", *_FEW), (NAME, TOKENIZER + "tokens"), "text"),
    Case("gguf: types too few", setting(TOKENIZER + "token_type", *_FEW), (NAME, "1 entries for 32 tokens"), "text"),
    Case("gguf: scores too few", setting(TOKENIZER + "scores", ARRAY, (FLOAT32, [1.0])), (NAME, "1 entries"), "text"),
    Case("gguf: scores of NaN", _NAN_SCORES, (NAME, "scores[31] is nan", "finite"), "text"),
    Case("gguf: no scores", without(TOKENIZER + "scores"), (NAME, TOKENIZER + "scores"), "text"),
    Case("gguf: no unknown token", unigram("token_type", (INT32, [1] * 32)), (NAME, "no unknown token"), "text"),
    Case("gguf: a map that leads out", _charsmap(_LEADS_OUT), (NAME, "precompiled_charsmap", "leads out"), "text"),
    Case("gguf: a map of 4 bytes", _charsmap(b"\1\0\0\0"), (NAME, "precompiled_charsmap", "has 4"), "text"),
    Case("gguf: bos beyond", setting(TOKENIZER + "bos_token_id", UINT32, 99), (NAME, "bos_token_id is 99"), "text"),
    Case(
        "gguf: merges of no tokens",
        file(
            lambda made: made.settings.update(
                {TOKENIZER + "model": (TEXT, "gpt2"), TOKENIZER + "merges": (ARRAY, (TEXT, ["x yz"]))}
            )
        ),
        (NAME, "cannot be built"),
        "text",
    ),
    Case(
        "gguf: a merge of three",
        file(
            lambda made: made.settings.update(
                {TOKENIZER + "model": (TEXT, "gpt2"), TOKENIZER + "merges": (ARRAY, (TEXT, ["a b", "a b c"]))}
            )
        ),
        (NAME, "merges[1] is a b c"),
        "text",
    ),
    Case(
        "gguf: a token of 4 MiB",
        setting(TOKENIZER + "tokens", ARRAY, (TEXT, [*LETTERS[:-1], "a" * (4 << 20)])),
        (NAME, "more than 512 characters"),
        "text",
    ),
    Case(
        "gguf: a template of a MiB",
        setting("tokenizer.chat_template", TEXT, "x" * (1 << 20)),
        (NAME, "tokenizer.chat_template", "1048576"),
        "text",
    ),
    Case(
        "gguf: a template that is a number",
        setting("tokenizer.chat_template", UINT32, 1),
        (NAME, "chat_template"),
        "text",
    ),
    Case("gguf: a template that is no Jinja", setting("tokenizer.chat_template", TEXT, "{% if"), ("template",), "text"),
]
