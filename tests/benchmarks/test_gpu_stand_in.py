"""msgspec's stand-in does what the engine relies on, as msgspec does it."""

import sys
from types import ModuleType
from typing import Annotated, Literal, NewType

import msgspec
import pytest

from benchmarks.gpu import stand_in

Number = NewType("Number", int)


@pytest.fixture(params=[msgspec, None], ids=["msgspec", "stand-in"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param is not None:
        return request.param
    monkeypatch.setitem(sys.modules, "msgspec", None)  # import raises ImportError
    for name in ("msgspec.structs", "msgspec.json"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert stand_in.install_where_missing()
    return sys.modules["msgspec"]


@pytest.fixture
def kinds(module: ModuleType) -> tuple[type, type]:
    class Inner(module.Struct, frozen=True, forbid_unknown_fields=True):
        size: int = 3
        kind: Literal["a", "b"] = "a"
        share: float | None = None

    class Outer(module.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
        name: str
        inner: Inner = Inner()
        numbers: tuple[Number, ...] = ()
        lists: list[list[int]] = []
        table: dict[str, float] = {}

    return Inner, Outer


def test_structs_have_fields_defaults_and_equality(kinds: tuple[type, type]) -> None:
    Inner, Outer = kinds
    one, other = Outer("x", Inner(4)), Outer(name="x", inner=Inner(size=4))
    assert one == other and one != Outer("y") and one.inner.size == 4
    one.lists.append([1])
    assert other.lists == [] and Outer.__struct_fields__ == ("name", "inner", "numbers", "lists", "table")
    assert hash(Inner(4)) == hash(Inner(4))
    with pytest.raises(TypeError):
        Outer()


def test_replace_makes_another(module: ModuleType, kinds: tuple[type, type]) -> None:
    Inner, _ = kinds
    one = Inner(4)
    assert module.structs.replace(one, kind="b") == Inner(4, "b") and one.kind == "a"


def test_convert_makes_structs_of_json_values(module: ModuleType, kinds: tuple[type, type]) -> None:
    Inner, Outer = kinds
    tree = {"name": "x", "inner": {"size": 1, "share": 2}, "numbers": [1, 2], "lists": [[1], []], "table": {"a": 1}}
    made = module.convert(tree, Outer)
    assert made == Outer("x", Inner(1, "a", 2.0), (1, 2), [[1], []], {"a": 1.0})
    assert isinstance(made.inner.share, float) and isinstance(made.table["a"], float)
    assert module.convert(dict(name="y", inner=Inner(9)), Outer).inner == Inner(9)


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"name": 1}, "Expected `str`, got `int` - at `$.name`"),
        ({"name": "x", "inner": {"kind": "c"}}, "at `$.inner.kind`"),
        ({"name": "x", "inner": {"sise": 1}}, "Object contains unknown field `sise` - at `$.inner`"),
        ({"name": "x", "inner": {"size": True}}, "Expected `int`, got `bool` - at `$.inner.size`"),
        ({"name": "x", "inner": {"size": None}}, "at `$.inner.size`"),
        ({"name": "x", "lists": [1]}, "at `$.lists[0]`"),
        ({"name": "x", "numbers": 1}, "at `$.numbers`"),
        ({"name": "x", "table": []}, "at `$.table`"),
        ({}, "Object missing required field"),
    ],
)
def test_convert_says_what_is_wrong_and_where(
    module: ModuleType, kinds: tuple[type, type], tree: dict[str, object], message: str
) -> None:
    with pytest.raises(module.ValidationError) as error:
        module.convert(tree, kinds[1])
    assert message in str(error.value)


def test_where_msgspec_is_installed_it_is_left_alone() -> None:
    assert not stand_in.install_where_missing() and sys.modules["msgspec"] is msgspec


def test_numbers_have_bounds(module: ModuleType) -> None:
    Even = Annotated[int, module.Meta(ge=2, le=8, multiple_of=2)]

    class Sized(module.Struct, frozen=True):
        size: Even
        share: Annotated[float, module.Meta(gt=0)] | None = None

    assert module.convert({"size": 4, "share": 0.5}, Sized) == Sized(4, 0.5)
    for wrong in ({"size": 1}, {"size": 3}, {"size": 10}, {"size": 4, "share": 0.0}, {"size": "4"}):
        with pytest.raises(module.ValidationError, match=r"\$\.(size|share)"):
            module.convert(wrong, Sized)


def test_json_is_decoded_into_types_and_in_two_steps(module: ModuleType, kinds: tuple[type, type]) -> None:
    Inner, _ = kinds
    raw = module.json.decode('{"a": {"size": 5}, "b": {"size": "5"}}', type=dict[str, module.Raw])
    assert module.json.decode(raw["a"], type=Inner) == Inner(5)
    with pytest.raises(module.ValidationError):
        module.json.decode(raw["b"], type=Inner)
    assert issubclass(module.ValidationError, module.DecodeError)
    with pytest.raises(module.DecodeError):
        module.json.decode("{")
