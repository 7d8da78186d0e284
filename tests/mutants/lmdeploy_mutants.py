"""Planted bugs of LMDeploy's pipeline and routes, and of the configuration classes, each with the tests that must notice it."""

from __future__ import annotations

from compat.config_object import ConfigObject
from compat.llm import arguments
from compat.lmdeploy import sampling
from compat.lmdeploy.pipeline import Pipeline, _response
from compat.lmdeploy.template import Template
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
    "a_refused_class_is_taken": (
        change_everywhere(arguments._flat, ("isinstance(value, ConfigObject) and value.refused", "False")),
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
    "a_greedy_answer_is_sampled": (
        change_everywhere(sampling.sampling_params, ("fields.pop(name, None)", "pass")),
        CONFIGS,
    ),
    "all_samples_have_one_seed": (
        change_everywhere(sampling.sampling_params, ("secrets.randbits(63)", "1")),
        CONFIGS,
    ),
    "a_failed_turn_stays_in_the_history": (
        change(Pipeline, "turn", ('if whole.finish_reason != "error":', "if False:")),
        PIPELINE,
    ),
    "a_left_stream_goes_on": (
        change(Pipeline, "stream_infer", ("output.abort()", "pass")),
        ["tests/lmdeploy/test_pipeline.py::test_a_stream_that_is_left_ends_its_requests"],
    ),
    "an_answer_has_no_index": (
        change_everywhere(_response, ("index=index,", "index=0,")),
        PIPELINE,
    ),
    "a_template_has_no_separator": (
        change(Template, "_written", ('(config.eoa or "") + (config.separator or "")', 'config.eoa or ""')),
        PIPELINE,
    ),
    "a_session_may_have_two_turns": (
        change(RunningTurns, "turn", ("if (namespace, session_id) in self._stops:", "if session_id < -1:")),
        ROUTE,
    ),
    "a_cancelled_turn_goes_on": (
        change(RunningTurns, "stop", ("stop.set()", "pass")),
        ROUTE,
    ),
    "sessions_of_all_keys_are_one": (
        change_everywhere(interactive._session, ("gateway.store.get(context.namespace,", 'gateway.store.get("",')),
        ROUTE,
    ),
    "a_turn_that_is_not_interactive_stays": (
        change_everywhere(interactive._keep, ("if not message.interactive_mode:", "if False:")),
        ROUTE,
    ),
    "history_is_counted_as_input": (
        change_everywhere(interactive._answer, ("reply.usage.prompt_tokens - history", "reply.usage.prompt_tokens")),
        ROUTE,
    ),
}
