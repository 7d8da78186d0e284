"""Planted bugs of LMDeploy's pipeline and routes, and of the configuration classes, each with the tests that must notice it."""

from __future__ import annotations

from compat.config_object import ConfigObject
from compat.llm import arguments
from compat.lmdeploy import sampling
from compat.lmdeploy.pipeline import _response
from gateway import interactive
from gateway.interactive import RunningTurns
from tests.mutants.changes import Plant, change, change_everywhere

PIPELINE = ["tests/lmdeploy/test_pipeline.py"]
CONFIGS = ["tests/lmdeploy/test_configs.py"]
CLASSES = ["tests/llm/test_configs.py"]
ROUTE = ["tests/gateway/test_interactive.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "defaults_of_a_class_reach_the_engine": (
        change(ConfigObject, "given", ("dict(vars(self))", "self.to_dict()")),
        CLASSES,
    ),
    "a_mistyped_field_is_ignored": (
        change(ConfigObject, "__init__", ("if name not in self.fields:", "if not name:")),
        CLASSES,
    ),
    "a_build_config_wins_over_the_arguments": (
        change(
            arguments.LlmArguments,
            "__init__",
            ("**_of_build_config(flat), **given", "**given, **_of_build_config(flat)"),
        ),
        CLASSES,
    ),
    "all_samples_have_one_seed": (
        change_everywhere(sampling.sampling_params, ("secrets.randbits(63)", "1")),
        CONFIGS,
    ),
    "an_answer_has_no_index": (
        change_everywhere(_response, ("index=index,", "index=0,")),
        PIPELINE,
    ),
    "a_session_may_have_two_turns": (
        change(RunningTurns, "turn", ("if (namespace, session_id) in self._stops:", "if session_id < -1:")),
        ROUTE,
    ),
    "sessions_of_all_keys_are_one": (
        change_everywhere(interactive._session, ("gateway.store.get(context.namespace,", 'gateway.store.get("",')),
        ROUTE,
    ),
}
