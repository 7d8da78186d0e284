"""Planted bugs of the LLM API, each with the test files of which one must notice it."""

from __future__ import annotations

from backend.llm import LLM, arguments, llm, logits, mapping
from backend.llm.chat import ChatTokenizer
from backend.llm.executor import GenerationExecutor
from backend.llm.folding import RequestFold, SequenceFold
from backend.llm.postprocessing import PostprocPool, PostprocProcess, PostprocWorker
from backend.llm.requests import GenerationRequest
from backend.llm.result import CompletionOutput, GenerationResult
from backend.llm.result_queue import ResultQueue
from backend.llm.sampling_params import SamplingParams
from backend.llm.worker import GenerationExecutorWorker
from backend.text.accumulator import OutputAccumulator
from tests.mutants.changes import Plant, change

EXECUTOR = ["tests/llm/test_executor.py"]
RESULTS = ["tests/llm/test_results.py"]
SEQUENCES = ["tests/llm/test_sequences.py"]
LOGITS = ["tests/llm/test_logits.py"]
MAPPING = ["tests/llm/test_mapping.py"]
POSTPROCESSING = ["tests/llm/test_postprocessing.py"]

MUTANTS: dict[str, tuple[Plant, list[str]]] = {
    "a_failed_prompt_stops_the_batch": (
        change(LLM, "generate", ("except RequestError", "except KeyError")),
        ["tests/llm/test_llm.py"],
    ),
    "failed_prompts_are_left_out_of_the_outputs": (
        change(LLM, "generate", ("[outputs.get(n) for n in range(len(prompts))]", "list(outputs.values())")),
        ["tests/llm/test_llm.py"],
    ),
    "a_chat_gets_a_second_beginning": (
        change(ChatTokenizer, "apply_chat_template", ("add_special_tokens=False", "add_special_tokens=True")),
        ["tests/llm/test_chat.py"],
    ),
    "a_chat_has_no_tools": (
        change(ChatTokenizer, "apply_chat_template", ("add_generation_prompt, tools", "add_generation_prompt")),
        ["tests/llm/test_chat.py"],
    ),
    "ids_stop_at_64_bits": (
        change(GenerationExecutor, "_get_next_client_id", (" % UINT64", "")),
        EXECUTOR,
    ),
    "ids_given_without_the_lock_of_their_request": (
        change(GenerationRequest, "set_id", ("if self._id is not None:", "if False:")),
        ["tests/llm/test_requests.py", *EXECUTOR],
    ),
    "a_final_response_leaves_the_request_behind": (
        change(
            GenerationExecutorWorker,
            "_deliver",
            (
                "self._results.pop(output.client_id, None) if output.is_final else self._results.get(output.client_id)",
                "self._results.get(output.client_id)",
            ),
        ),
        EXECUTOR,
    ),
    "the_engine_goes_on_after_a_stop_string": (
        change(GenerationExecutorWorker, "_deliver", ("if output.wants_cancel:", "if False:")),
        SEQUENCES,
    ),
    "a_fault_of_the_dispatcher_leaves_others_waiting": (
        change(GenerationExecutorWorker, "_dispatch", ("        self._fail_all(self._failure)\n", "")),
        ["tests/llm/test_executor.py::test_a_fault_of_the_dispatcher_is_raised_to_all_who_wait_and_to_all_who_come"],
    ),
    "who_comes_after_a_fault_waits_for_ever": (
        change(GenerationExecutorWorker, "_check_open", ("if self._failure is not None:", "if False:")),
        ["tests/llm/test_executor.py::test_a_fault_of_the_dispatcher_is_raised_to_all_who_wait_and_to_all_who_come"],
    ),
    "the_timeout_begins_anew_with_each_token": (
        change(GenerationResult, "result", ("max(0.0, end - time.monotonic())", "timeout")),
        ["tests/llm/test_results.py::test_the_timeout_is_for_the_whole_result_and_not_for_each_token"],
    ),
    "of_several_processors_each_gets_the_models_logits": (
        change(logits, "in_order", ("logits if returned is None else returned", "logits")),
        LOGITS,
    ),
    "processors_of_requests_are_kept_for_ever": (
        change(GenerationExecutorWorker, "_hand_on", ("arrival.response.is_final and", "False and")),
        LOGITS,
    ),
    "rows_of_cut_tokens_stay": (
        change(CompletionOutput, "_cut_rows", ("self.generation_logits[:count]", "self.generation_logits")),
        LOGITS,
    ),
    "the_prompt_ends_without_its_last_entry": (
        change(SequenceFold, "_of_prompt", ("known if self._first is None else", "known if True else")),
        ["tests/llm/test_log_probs.py"],
    ),
    "who_was_told_early_never_hears_of_the_prompt": (
        change(SequenceFold, "_of_prompt", ("known is None or self._prompt_is_told", "self._prompt_is_told")),
        SEQUENCES,
    ),
    "only_one_waiter_hears_of_the_end": (
        change(GenerationResult, "_apply", ("if self._done:", "if False:")),
        ["tests/llm/test_results.py::test_all_who_wait_for_a_result_are_told_of_its_end"],
    ),
    "the_diff_of_an_earlier_step_stays": (
        change(GenerationResult, "_take_in", ("    for output in self._outputs:\n        output.begin_step()\n", "")),
        RESULTS,
    ),
    "the_best_come_last": (
        change(GenerationResult, "outputs", (", reverse=True", "")),
        SEQUENCES,
    ),
    "a_closed_event_loop_ends_the_dispatcher": (
        change(ResultQueue, "put", ("except RuntimeError:", "except KeyError:")),
        ["tests/llm/test_results.py::test_an_event_loop_that_was_closed_holds_up_nobody"],
    ),
    "what_is_kept_of_an_output_is_doubled": (
        change(CompletionOutput, "apply", ("self.text[: update.text_kept] + ", "self.text + ")),
        SEQUENCES,
    ),
    "tokens_behind_a_stop_string_stay": (
        change(OutputAccumulator, "_cut", ("    del self.ids[kept:]\n", "")),
        SEQUENCES,
    ),
    "a_stop_token_stays_in_the_text": (
        change(OutputAccumulator, "withdraw", ("if self._stream is not None:", "if False:")),
        SEQUENCES,
    ),
    "a_new_beam_keeps_the_text_of_the_old_one": (
        change(OutputAccumulator, "replace", ("same < len(self.ids) or ", "")),
        SEQUENCES,
    ),
    "beams_end_at_their_first_stop_string": (
        change(RequestFold, "is_final", ("if self._params.beams:", "if False:")),
        SEQUENCES,
    ),
    "every_token_is_told_whatever_the_interval": (
        change(SequenceFold, "is_due", (">= self._params.stream_interval", ">= 1")),
        RESULTS,
    ),
    "all_requests_go_to_the_first_process": (
        change(PostprocPool, "worker_of", ("client_id % len(self._workers)", "0")),
        POSTPROCESSING,
    ),
    "an_error_leaves_its_state_in_the_worker": (
        change(
            PostprocWorker, "handle", ("    self._folds.pop(client_id, None)\n    return failed", "    return failed")
        ),
        POSTPROCESSING,
    ),
    "a_process_that_hangs_holds_up_the_end": (
        change(GenerationExecutorWorker, "shutdown", ("self._thread.join(END_GRACE_S)", "self._thread.join()")),
        POSTPROCESSING,
    ),
    "the_end_of_a_process_is_not_told": (
        change(PostprocProcess, "_listen", ("        self._on_lost(self)\n", "        pass\n")),
        ["tests/llm/test_postprocessing.py::test_the_requests_of_a_process_that_ends_fail_and_so_do_those_that_follow"],
    ),
    "greedy_requests_send_what_samples": (
        change(mapping, "sampling_config", ("params.is_greedy and field", "False and field")),
        MAPPING,
    ),
    "beams_without_beam_search": (
        change(mapping, "sampling_config", ("if params.use_beam_search:", "if params.num_sequences > 1:")),
        MAPPING,
    ),
    "a_dense_bias_is_sent_whole": (
        change(mapping, "_logit_bias", (" if value != 0", "")),
        MAPPING,
    ),
    "stop_strings_wait_for_the_end": (
        change(mapping, "_has_to_be_watched", ("return bool(", "return False and bool(")),
        MAPPING,
    ),
    "a_list_of_ints_is_many_prompts": (
        change(llm, "_is_one", ('bool(inputs) and hasattr(inputs[0], "__index__")', "False")),
        ["tests/llm/test_llm.py"],
    ),
    "the_first_tokens_are_kept": (
        change(llm, "_truncated", ("ids[-params.truncate_prompt_tokens :]", "ids[: params.truncate_prompt_tokens]")),
        ["tests/llm/test_llm.py"],
    ),
    "unknown_arguments_are_ignored": (
        change(arguments.LlmArguments, "__init__", ("raise TypeError(_unknown(name))", "continue")),
        ["tests/llm/test_arguments.py"],
    ),
    "greedy_requests_may_have_several_sequences": (
        change(SamplingParams, "_check", ("and self.is_greedy and", "and False and")),
        ["tests/llm/test_sampling_params.py"],
    ),
}
