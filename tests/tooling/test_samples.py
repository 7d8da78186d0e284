"""The cases that a full run keeps: each value of each parameter, and a share of all."""

from __future__ import annotations

import itertools

import pytest

from tests.samples import sample, values

PRODUCT = [{f"isa {isa}", f"form {form}", f"rows {rows}"} for isa, form, rows in itertools.product("ab", "cdef", "gh")]


@pytest.mark.parametrize("name", ["a test", "another", "a third one"])
def test_no_value_is_missing_and_not_more_cases_are_kept_than_that_takes(name: str) -> None:
    kept = sample(PRODUCT, 16, name)
    assert set().union(*(PRODUCT[index] for index in kept)) == set().union(*PRODUCT)
    assert len(kept) == 4, "as many as the longest parameter has values"
    assert kept == sample(PRODUCT, 16, name), "the same in every run"


def test_one_of_so_many_cases_is_kept_however_few_hold_all_values() -> None:
    assert [len(sample(PRODUCT, every, "a test")) for every in (1, 2, 3, 4, 100)] == [16, 8, 6, 4, 4]


def test_other_tests_have_other_combinations() -> None:
    assert len({frozenset(sample(PRODUCT, 16, f"test {number}")) for number in range(20)}) > 5


def test_a_value_of_one_case_only_keeps_that_case() -> None:
    cases = [*PRODUCT, {"isa a", "form c", "rows seldom"}]
    assert len(cases) - 1 in sample(cases, 100, "a test")


def test_the_elements_of_a_tuple_are_values_of_their_own() -> None:
    def of(*case: object) -> set:
        return set(values({"case": case}))

    assert len(of("avx2", ("bfloat16", 8))) == 3
    assert of("avx2", ("bfloat16", 8)) & of("avx2", ("float32", 4)) == of("avx2")
    assert not of(1) & of(True), "what is equal but of another type is another value"
    shared: list[int] = []
    assert of(shared) == of(shared) and not of(shared) & of([])


def test_an_empty_tuple_is_a_value() -> None:
    assert set(values({"case": ()})) != set(values({"case": (1,)})) and len(set(values({"case": ()}))) == 1
