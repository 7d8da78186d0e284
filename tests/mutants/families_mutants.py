"""Planted bugs of the families: settings that are read wrong, ignored, or computed otherwise than transformers computes them."""

from __future__ import annotations

from backend.architectures import common, gemma, post_norm, rope
from backend.architectures.settings import Settings
from backend.layers import rotary
from tests.mutants.changes import Plant, change, change_everywhere

_AGREES = "tests/families/test_transformers.py::test_a_family_agrees_with_transformers"
_SETTINGS = "tests/families/test_settings.py"
_ROPES = "tests/families/test_ropes.py"


def _torch(name: str) -> list[str]:
    return [f"{_AGREES}[torch-{name}]"]


MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "a_value_that_is_not_supported_is_taken": (change(Settings, "only", ("not in values", "in ()")), [_SETTINGS]),
    "queries_of_gemma_are_scaled_by_the_head": (
        change(gemma, "_scaled", ("** -0.5", "* 0 + 16**-0.5")),
        _torch("gemma 2"),
    ),
    "norms_of_olmo_are_of_heads": (
        change_everywhere(post_norm.olmo2, ('"row"', '"none"')),
        ["tests/families/test_transformers.py::test_a_family_agrees_with_transformers[torch-olmo 2]"],
    ),
    "windows_are_where_none_is": (
        change_everywhere(common.windowed, ("if has_window", "if not has_window")),
        _torch("gemma 2"),
    ),
    "yarn_has_no_factor": (change(rope, "_scaled", ("_yarn_attention(section, factor)", "1.0")), [_ROPES]),
    "borders_of_yarn_are_not_rounded": (change(rotary, "_yarn", ("if rope.truncate", "if False")), [_ROPES]),
    "longrope_is_always_long": (
        change_everywhere(rotary.inverse_frequencies, ("if num_positions > rope.original_max_position", "if True")),
        [_ROPES],
    ),
}
