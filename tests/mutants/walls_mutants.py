"""Bugs planted in what keeps one client's request from the others: turns of text threads, limits of rendering, streams that are
read on, models of the user's own.
"""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.core import limited_server
from backend.serving.intake import text_turns
from backend.serving.intake.rendering import RenderProcess
from gateway.triton_client import TritonLink
from tests.mutants.changes import Plant, change

POOL, TURNS = ["tests/serving/test_text_pool.py"], ["tests/serving/test_text_turns.py"]
LEAST, LIMITS = ["tests/text/test_least_tokens.py"], ["tests/serving/test_limits.py"]
RENDERING, SUSPECTS = ["tests/serving/test_rendering.py"], ["tests/serving/test_suspects.py"]
CHILDREN = ["tests/guided/test_compile_limits.py"]
LEAVING, FOREIGN = ["tests/gateway/test_leaving.py"], ["tests/deploy/test_foreign.py"]
CONTROL, FRONT = ["tests/deploy/test_control_socket.py"], ["tests/replicas/test_front.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "a_namespace_may_have_all_threads": (
        change(text_turns._Lane, "__init__", ("max(1, num_threads // 2)", "num_threads")),
        TURNS,
    ),
    "a_child_has_the_memory_of_the_machine": (
        change(limited_server, "_limit_memory", ("_lower(resource.RLIMIT_AS, ", "_lower(resource.RLIMIT_CORE, ")),
        CHILDREN,
    ),
    "a_chat_is_waited_for_without_end": (
        change(RenderProcess, "_outcome", ("task, self._patience_s)", "task)")),
        RENDERING,
    ),
    "a_stream_has_a_deadline": (
        change(
            TritonLink,
            "stream",
            ("(_once(self._message(job))))", "(_once(self._message(job)), timeout=self._timeout_s))"),
        ),
        LEAVING,
    ),
}
