"""The parts of a packed model (backend/models/parts.py) on their way to the cache of weights, and back."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import CDLL

from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.layers.linear import Linear
from backend.models.parts import Parts
from backend.worker.weight_file import Content, DamagedWeights
from kernels.cpu.linear import PackedLinear
from kernels.cpu.screen import Screen

_EMBEDDING, _HEAD, _SCREEN = "embedding of the model", "head of the model", "screen of the head"  # no names of tensors
_NUM_LINEAR_PARTS, _NUM_SCREEN_PARTS = 4, 4


class RecordedParts:
    """Hands on the parts of another, and remembers them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tensors: dict[str, Tensor] = {}
        self._linears: dict[str, PackedLinear] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._tensors[name] = self._parts.take(name, shape)
        return self._tensors[name]

    def linear(
        self, rows: Mapping[str, int], columns: int, has_bias: bool, is_rounded: bool = True, by_head: bool = False
    ) -> Linear:
        return self._remember(_name_of(rows), self._parts.linear(rows, columns, has_bias, is_rounded, by_head))

    def embedding(self) -> Tensor | Linear:
        taken = self._parts.embedding()
        if isinstance(taken, Tensor):
            self._tensors[_EMBEDDING] = taken
            return taken
        return self._remember(_EMBEDDING, taken)

    def head(self, embedding: Tensor | Linear, rows: int) -> Linear:
        head = self._parts.head(embedding, rows)
        return head if head is embedding else self._remember(_HEAD, head)

    def finish(self) -> None:
        self._parts.finish()

    def content(self, screen: Screen | None) -> Content:
        tensors, numbers = dict(self._tensors), {}
        for name, linear in self._linears.items():
            numbers[name] = [*linear.shape, linear.struct.format, linear.struct.group]
            tensors |= _named(name, linear.parts)
        return Content(tensors | _named(_SCREEN, () if screen is None else screen.parts), numbers)

    def _remember(self, name: str, linear: Linear) -> Linear:
        assert isinstance(linear, PackedLinear), "only the native tier's weights are kept"
        self._linears[name] = linear
        return linear


class KeptParts:
    """The parts of a model that is in the cache. Methods raise DamagedWeights for one that is missing or of another shape."""

    def __init__(self, library: CDLL, content: Content, config: ModelConfig) -> None:
        self._library, self._content, self._config = library, content, config

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._content.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            raise DamagedWeights(f"it has no tensor {name} of shape {list(shape)}")
        return tensor

    def linear(
        self, rows: Mapping[str, int], columns: int, has_bias: bool, is_rounded: bool = True, by_head: bool = False
    ) -> Linear:
        linear = self._linear(_name_of(rows), sum(rows.values()), columns)
        if has_bias != bool(linear.struct.bias):
            raise DamagedWeights(f"its layer {_name_of(rows)} differs in having a bias")
        return linear

    def embedding(self) -> Tensor | Linear:
        vocab, hidden = self._config.vocab_size, self._config.hidden_size
        if _EMBEDDING in self._content.tensors:
            return self.take(_EMBEDDING, (vocab, hidden))
        return self._linear(_EMBEDDING, vocab, hidden)

    def head(self, embedding: Tensor | Linear, rows: int) -> Linear:
        if not isinstance(embedding, Tensor) and _HEAD not in self._content.numbers:
            return embedding
        return self._linear(_HEAD, rows, embedding.shape[1])

    def finish(self) -> None:
        pass  # only the screen is left

    def screen(self, lm_head: PackedLinear) -> Screen | None:
        """None: the model has none."""
        parts = self._parts(_SCREEN, _NUM_SCREEN_PARTS)
        if parts[0] is None:
            return None
        try:
            return Screen(self._library, lm_head, tuple(part for part in parts if part is not None))
        except ValueError as error:
            raise DamagedWeights(str(error)) from None

    def _linear(self, name: str, n: int, k: int) -> PackedLinear:
        numbers = self._content.numbers.get(name, [])
        if numbers[:2] != [n, k] or len(numbers) != 4:
            raise DamagedWeights(f"it has no layer {name} of {n} rows and {k} columns")
        try:
            return PackedLinear.of_parts(self._library, self._parts(name, _NUM_LINEAR_PARTS), n, k, *numbers[2:])
        except ValueError as error:
            raise DamagedWeights(f"{name}: {error}") from None

    def _parts(self, name: str, count: int) -> tuple[Tensor | None, ...]:
        return tuple(self._content.tensors.get(f"{name} {index}") for index in range(count))


def _named(name: str, parts: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    return {f"{name} {index}": part for index, part in enumerate(parts) if part is not None}


def _name_of(rows: Mapping[str, int]) -> str:
    """The name of a linear layer: that of its first projection."""
    return next(iter(rows))
