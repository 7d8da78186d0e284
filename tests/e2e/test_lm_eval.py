"""What lm-eval finds through /v1/completions is what it finds with transformers: by itself where it is installed, and by its
requests and its arithmetic everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.e2e.oracles import result_of
from tests.gateway.conftest import Served

pytestmark = pytest.mark.feature("W-11")
DEFAULT = Path(__file__).resolve().parents[2] / "models" / "default"
# (context, continuation), of which a task makes choices and texts
PAIRS = [
    ("import os\n\n\ndef read_lines(path):\n    with open(path) as", " file:"),
    ("for each in range(10):\n", "    print(each)"),
    ("for each in range(10):\n", "    zebra(banana)"),
    ("x", " = 1"),
    ("class Stack:\n    def __init__(self):\n        self.items", " = []\n"),
]
TOLERANCE = 1e-3


class Oracle:
    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(DEFAULT / "tokenizer.json"))
        self.model = AutoModelForCausalLM.from_pretrained(DEFAULT, dtype=torch.float32, attn_implementation="eager")

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text).ids
        return found

    @torch.inference_mode()
    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """Of the whole vocabulary behind each token, [tokens, vocabulary]."""
        return torch.log_softmax(self.model(torch.tensor([ids])).logits[0], -1)

    def likelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The log-likelihood of a continuation, and whether it is the greedy one."""
        rows = self.log_probs(context + continuation)[len(context) - 1 : -1]
        own = rows[range(len(continuation)), continuation]
        return own.sum().item(), rows.argmax(-1).tolist() == continuation


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def lm_evals_arithmetic(choice: Any, num_context: int) -> tuple[float, bool]:
    """LocalCompletionsAPI.parse_logprobs of lm-eval 0.4: the last score is that of the token that was generated."""
    logs, tops = choice["token_logprobs"][num_context:-1], choice["top_logprobs"][num_context:-1]
    return sum(logs), all(log == max(top.values()) for log, top in zip(logs, tops, strict=True))


@pytest.mark.parametrize("as_text", [False, True])
def test_lm_evals_requests_and_arithmetic_give_transformers_likelihoods(
    as_text: bool, served: Served, oracle: Oracle
) -> None:
    ids = [(oracle.ids(context), oracle.ids(context + more)[len(oracle.ids(context)) :]) for context, more in PAIRS]
    texts = [oracle.tokenizer.decode(context + more) for context, more in ids]
    prompts: list[Any] = texts if as_text else [context + more for context, more in ids]
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    status, answer, _ = served.request("POST", "/v1/completions", {"model": "everbatch", "prompt": prompts, **asked})
    assert status == 200
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    for (context, more), choice in zip(ids, choices, strict=True):
        found, is_greedy = lm_evals_arithmetic(choice["logprobs"], len(context))
        expected = oracle.likelihood(context, more)
        assert found == pytest.approx(expected[0], abs=TOLERANCE) and is_greedy is expected[1]


def test_five_alternatives_of_each_token_are_those_of_transformers(client: openai.OpenAI, oracle: Oracle) -> None:
    """With `max_tokens` 0 by OpenAI's client: only the prompt is scored."""
    ids = oracle.ids(PAIRS[0][0])
    prompts: Any = [PAIRS[0][0], PAIRS[3][0]]
    reply = client.completions.create(model="everbatch", prompt=prompts, echo=True, logprobs=5, max_tokens=0)
    told = reply.choices[0].logprobs
    assert told is not None and told.token_logprobs is not None and told.top_logprobs is not None
    assert reply.usage is not None and reply.usage.completion_tokens == 0
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    assert "".join(told.tokens or []) == PAIRS[0][0] and len(reply.choices) == 2
    rows = oracle.log_probs(ids)
    for place, token_id in enumerate(ids[1:]):
        values, best = rows[place].topk(5)
        expected = {oracle.tokenizer.decode([one]): value for one, value in zip(best.tolist(), values.tolist())}
        found = told.top_logprobs[place + 1]
        assert told.token_logprobs[place + 1] == pytest.approx(rows[place, token_id].item(), abs=TOLERANCE)
        assert {text: found[text] for text in expected if text in found} == pytest.approx(
            {text: value for text, value in expected.items() if text in found}, abs=TOLERANCE
        )
        assert len(found) in (5, 6)


PROGRAM = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
given = json.loads(sys.argv[1])
tasks = TaskManager(include_path=given["tasks"], include_defaults=False)
def scores(model, arguments):
    found = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=given["names"], task_manager=tasks,
                                    batch_size=given["batch"], device="cpu", bootstrap_iters=0, log_samples=True)
    by_id = {name: sorted(samples, key=lambda one: one["doc_id"]) for name, samples in found["samples"].items()}
    return {name: [one["filtered_resps"] for one in samples] for name, samples in by_id.items()}
hf = scores("hf", {"pretrained": given["model"], "dtype": "float32", "max_length": 512})
ours = scores("local-completions", {"model": "everbatch", "base_url": given["url"], "tokenizer": given["model"],
              "tokenizer_backend": "huggingface", "tokenized_requests": given["tokenized"], "max_length": 513})
print(json.dumps([hf, ours], default=str))
"""
CHOICE = """task: our_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
ROLLING = """task: our_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{context}}}}"
metric_list: [{{metric: word_perplexity}}]
"""


@pytest.mark.parametrize(("tokenized", "batch"), [(True, 4), (False, 1)])
def test_lm_eval_finds_the_likelihoods_of_its_own_hf_backend(
    tokenized: bool, batch: int, served: Served, tmp_path: Path
) -> None:
    documents = [{"context": context, "choices": [more, " zebra"]} for context, more in PAIRS]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, documents)))
    for name, task in (("choice", CHOICE), ("rolling", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(task.format(file=tmp_path / "test.jsonl"))
    hf, ours = result_of(
        PROGRAM,
        "lm_eval",
        {
            "tasks": str(tmp_path),
            "names": ["our_choice", "our_rolling"],
            "model": str(DEFAULT),
            "url": f"{served.url}/v1/completions",
            "tokenized": tokenized,
            "batch": batch,
        },
    )
    assert [len(hf[name]) for name in ("our_choice", "our_rolling")] == [len(PAIRS)] * 2
    assert likelihoods(ours) == pytest.approx(likelihoods(hf), abs=TOLERANCE)
    assert greedy(ours) == greedy(hf)


def likelihoods(found: dict[str, Any]) -> list[float]:
    """Of the choices, and of the whole texts."""
    pairs = [pair for answers in found["our_choice"] for pair in answers]
    return [float(pair[0]) for pair in pairs] + [float(answer[0]) for answer in found["our_rolling"]]


def greedy(found: dict[str, Any]) -> list[bool]:
    return [str(pair[1]) == "True" for answers in found["our_choice"] for pair in answers]
