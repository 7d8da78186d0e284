"""Bugs planted in what keeps one client's request from the others: turns of text threads, limits of rendering, streams that are
read on, models of the user's own.
"""

from __future__ import annotations

# This one goes first: it brings the triton_python_backend_utils that backend.serving needs.
from tests.serving import conftest  # noqa: F401

# isort: split

from backend.core import limited_server
from backend.core.limited_server import LimitedServer
from backend.replicas.front import ReplicaFront
from backend.serving.intake import text_turns
from backend.serving.intake.rendering import RenderProcess
from backend.serving.intake.suspects import Suspects
from backend.serving.intake.text_pool import TextPool
from backend.serving.wires import limits
from backend.text import least_tokens
from backend.text.least_tokens import LeastTokens
from deploy import foreign
from deploy.model_control import ModelControl
from deploy.stubs import Stubs
from gateway.triton_client import TritonLink
from tests.mutants.changes import Plant, change

POOL, TURNS = ["tests/serving/test_text_pool.py"], ["tests/serving/test_text_turns.py"]
LEAST, LIMITS = ["tests/text/test_least_tokens.py"], ["tests/serving/test_limits.py"]
RENDERING, SUSPECTS = ["tests/serving/test_rendering.py"], ["tests/serving/test_suspects.py"]
CHILDREN = ["tests/guided/test_compile_limits.py"]
LEAVING, FOREIGN = ["tests/gateway/test_leaving.py"], ["tests/deploy/test_foreign.py"]
CONTROL, FRONT = ["tests/deploy/test_control_socket.py"], ["tests/replicas/test_front.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "long_texts_stand_before_short_ones": (
        change(text_turns.TextTurns, "put", ("num_bytes > LONG_BYTES", "False")),
        POOL,
    ),
    "a_namespace_may_have_all_threads": (
        change(text_turns._Lane, "__init__", ("max(1, num_threads // 2)", "num_threads")),
        TURNS,
    ),
    "a_turn_that_is_over_frees_no_thread": (
        change(TextPool, "_leave_thread", ("self._calls.put(True)", "pass")),
        POOL,
    ),
    "what_was_composed_counts": (
        change(LeastTokens, "of", ("self._ascii_only and not data.isascii()", "False")),
        LEAST,
    ),
    "unknown_characters_count": (change(LeastTokens, "__init__", ("if bytes([byte]) in single", "")), LEAST),
    "a_step_that_drops_characters_is_taken_for_harmless": (
        change(least_tokens, "_steps", ("if part is None:", "if True:")),
        LEAST,
    ),
    "what_cannot_fit_is_tokenised": (change(limits, "ids_within", ("len(text) > most and", "False and")), LIMITS),
    "a_child_has_the_memory_of_the_machine": (
        change(limited_server, "_limit_memory", ("_lower(resource.RLIMIT_AS, ", "_lower(resource.RLIMIT_CORE, ")),
        CHILDREN,
    ),
    "a_child_has_no_limit_of_time": (
        change(limited_server, "_limit_cpu", ("signal.setitimer(signal.ITIMER_PROF, cpu_s)", "pass")),
        CHILDREN,
    ),
    "each_job_has_a_child_of_its_own": (
        change(LimitedServer, "_rest", ("self._idle.append(child)", "pass")),
        CHILDREN,
    ),
    "a_chat_is_waited_for_without_end": (
        change(RenderProcess, "_outcome", ("task, self._patience_s)", "task)")),
        RENDERING,
    ),
    "what_ended_a_stub_is_read_again": (
        change(Suspects, "reading", ("if digest in self._suspects:", "if False:")),
        SUSPECTS,
    ),
    "what_has_been_read_is_a_suspect": (
        change(Suspects, "reading", ("self._note(place, _NOTHING)", "pass")),
        SUSPECTS,
    ),
    "a_stream_has_a_deadline": (
        change(
            TritonLink,
            "stream",
            ("(_once(self._message(job))))", "(_once(self._message(job)), timeout=self._timeout_s))"),
        ),
        LEAVING,
    ),
    "a_stopped_replica_is_waited_for": (change(ReplicaFront, "_look", ("self._leave_stopped()", "pass")), FRONT),
    "wrong_settings_wait_for_their_turn": (
        change(ModelControl, "replace", ("self._check(name)", "pass")),
        CONTROL,
    ),
    "a_stub_of_the_users_is_never_missed": (
        change(Stubs, "_is_missed", ("return ready is True", "return False")),
        FOREIGN,
    ),
    "an_unloaded_model_of_the_users_is_missed": (
        change(Stubs, "_is_missed", ("return ready is True", "return True")),
        FOREIGN,
    ),
    "a_broken_model_of_ours_is_left_out": (
        change(foreign, "leave_out_broken", ("each.name not in names or ", "")),
        FOREIGN,
    ),
}
