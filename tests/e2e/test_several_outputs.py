"""Beams, several sequences, logits and prompt embeddings over a real server, against transformers on the same checkpoint."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from backend.api import load_config
from backend.serving.model_config import MODEL_ENTRY, render
from backend.serving.wires.roles import MODELS
from backend.text.tokenizer import Tokenizer
from deploy.triton_server import TritonServer
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.e2e.wire import TYPES, TokenClient, eventually, num_cancelled, post, scrape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "models" / "default"
PROMPT = [5, 17, 3, 99]
BEAMS, NEW = 4, 12
PENALTY = 0.5  # exact in FP32
SERVED = (
    "model.gather_context_logits=true",
    "model.gather_generation_logits=true",
    "triton.text_threads=1",
)
PARAMETERS = 'parameters { key: "max_beam_width" value: { string_value: "4" } }\n'
TYPES |= {
    "beam_width": np.int32,
    "num_return_sequences": np.int32,
    "len_penalty": np.float32,
    "early_stopping": bool,
    "return_context_logits": bool,
    "return_generation_logits": bool,
    "prompt_embedding_table": np.float16,
    "retention_token_range_starts": np.int32,
    "retention_token_range_ends": np.int32,
    "retention_token_range_priorities": np.int32,
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Not ready yet: the oracle is loaded meanwhile."""
    root = tmp_path_factory.mktemp("several")
    for role in ("tensorrt_llm", "tensorrt_llm_bls"):
        (root / "models" / role / "1").mkdir(parents=True)
        shutil.copyfile(MODEL_ENTRY, root / "models" / role / "1" / "model.py")
        text = render(MODELS[role], name=role)
        (root / "models" / role / "config.pbtxt").write_text(text + (PARAMETERS if role == "tensorrt_llm" else ""))
    config = load_config(overrides=[*EXACT, *SERVED])
    with TritonServer(
        config, run_dir=root / "run", model_repository=root / "models", probe_model=None, exit_timeout_s=5
    ) as server:
        yield server


@pytest.fixture(scope="module")
def oracle(started: TritonServer) -> PreTrainedModel:
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    return LlamaForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(started: TritonServer, oracle: PreTrainedModel) -> TritonServer:
    wait_ready(started)
    return started


def searched(oracle: PreTrainedModel, prompt: list[int], num_beams: int) -> tuple[list[list[int]], list[float]]:
    """The outputs of transformers' beams, the best first, and the sums of their log-probabilities.

    Its score is the sum divided by the length to the power of the penalty; all have the same length.
    """
    import torch

    found = oracle.generate(
        torch.tensor([prompt]),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=NEW,
        do_sample=False,
        length_penalty=PENALTY,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return found.sequences[:, len(prompt) :].tolist(), (found.sequences_scores * NEW**PENALTY).tolist()


def told(stream: Any) -> list[dict[str, np.ndarray]]:
    """The outputs of all responses up to the final one, of which there is one."""
    return [
        {output.name: result.as_numpy(output.name) for output in result.get_response().outputs} for result in stream
    ]


@pytest.mark.feature("W-02", "000-32")
def test_four_beams_equal_those_of_transformers(
    server: TritonServer, tokens: TokenClient, oracle: PreTrainedModel
) -> None:
    inputs = {"beam_width": BEAMS, "len_penalty": PENALTY, "early_stopping": False, "exclude_input_in_output": True}
    (answer,) = told(tokens.start(PROMPT, NEW, return_log_probs=True, **inputs))
    ids, sums = searched(oracle, PROMPT, BEAMS)
    assert answer["output_ids"].tolist() == [ids] and answer["sequence_length"].tolist() == [[NEW] * BEAMS]
    np.testing.assert_allclose(answer["cum_log_probs"], [sums], rtol=1e-4)
    np.testing.assert_allclose(answer["output_log_probs"].sum(axis=-1), [sums], rtol=1e-4)
    assert "sequence_index" not in answer
    (two,) = told(tokens.start(PROMPT, NEW, num_return_sequences=2, **inputs))
    assert two["output_ids"].tolist() == [ids[:2]]
    streamed = told(tokens.start(PROMPT, NEW, streaming=True, **inputs))
    assert len(streamed) > 1 and streamed[-1]["output_ids"].tolist() == [ids]


@pytest.mark.feature("W-02", "W-05", "000-30")
def test_three_sequences_stream_side_by_side(server: TritonServer, tokens: TokenClient) -> None:
    """The first of them is what a request for one sequence of the same seed gets."""
    sampled = {"runtime_top_k": 50, "temperature": 1.0, "seed": 7}
    pieces: dict[int, list[int]] = defaultdict(list)
    for answer in told(tokens.start(PROMPT, NEW, streaming=True, num_return_sequences=3, **sampled)):
        pieces[int(answer["sequence_index"][0, 0])] += answer["output_ids"][0, 0].tolist()
    assert sorted(pieces) == [0, 1, 2] and {len(ids) for ids in pieces.values()} == {NEW}
    assert len({tuple(ids) for ids in pieces.values()}) == 3
    assert pieces[0] == tokens.generate(PROMPT, NEW, **sampled)
    whole = told(tokens.start(PROMPT, NEW, num_return_sequences=3, **sampled))
    assert {int(each["sequence_index"][0, 0]): each["output_ids"][0, 0].tolist() for each in whole} == {
        index: PROMPT + ids for index, ids in pieces.items()
    }


@pytest.mark.feature("W-05")
def test_cancelling_ends_all_sequences(server: TritonServer, tokens: TokenClient) -> None:
    """That none of them goes on, the fixture `nothing_stays_in_use` finds."""
    before = num_cancelled(server.metrics_url)
    stream = tokens.start(PROMPT, 2000, streaming=True, num_return_sequences=3, runtime_top_k=50)
    next(iter(stream))
    stream.cancel()
    with pytest.raises(InferenceServerException, match="CANCELLED|cancelled"):
        list(stream)
    assert eventually(lambda: num_cancelled(server.metrics_url) > before, 20)
    assert eventually(lambda: scrape(server.metrics_url)["everbatch_requests{state=active}"] == 0, 20)


@pytest.mark.feature("W-02", "001-52")
def test_logits_equal_a_plain_forward(server: TritonServer, tokens: TokenClient, oracle: PreTrainedModel) -> None:
    """The prompt is one of its own, so that no KV of it is found in the cache."""
    import torch

    prompt = [201, 202, 203, 204, 205]
    inputs = {"return_context_logits": True, "return_generation_logits": True, "exclude_input_in_output": True}
    (answer,) = told(tokens.start(prompt, 3, **inputs))
    ids = answer["output_ids"][0, 0].tolist()
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *ids[:-1]]])).logits.numpy()
    assert answer["context_logits"].shape == (1, 5, 4096) and answer["generation_logits"].shape == (1, 1, 3, 4096)
    np.testing.assert_allclose(answer["context_logits"], logits[:, :5], atol=1e-3)
    np.testing.assert_allclose(answer["generation_logits"][0], logits[:, 4:], atol=1e-3)


@pytest.mark.feature("W-01", "000-18")
def test_embeddings_stand_for_ids_beyond_the_vocabulary(
    server: TritonServer, tokens: TokenClient, oracle: PreTrainedModel
) -> None:
    """A table with the rows of tokens 99 and 5, rounded to the wire's FP16, in the places of these tokens."""
    import torch

    weight = oracle.get_input_embeddings().weight.detach()
    table = weight[[99, 5]].to(torch.float16)
    embedded = torch.cat([table[1:].float(), weight[[17, 3]], table[:1].float()])
    with torch.inference_mode():
        logits = oracle(inputs_embeds=embedded[None]).logits.numpy()
    inputs = {"prompt_embedding_table": table.numpy(), "return_context_logits": True}
    (answer,) = told(tokens.start([4097, 17, 3, 4096], 1, **inputs))
    np.testing.assert_allclose(answer["context_logits"], logits, atol=1e-3)


@pytest.mark.feature("W-01", "W-04")
def test_retention_is_taken_and_checked(server: TritonServer, tokens: TokenClient) -> None:
    ranges = {"retention_token_range_starts": [0], "retention_token_range_ends": [-1]}
    assert len(tokens.generate(PROMPT, 2, retention_token_range_priorities=[90], **ranges)) == 2
    message = tokens.error_of(tokens.start(PROMPT, 2, retention_token_range_priorities=[101], **ranges))
    assert "retention priority is 101, allowed is 0 to 100" in message
    assert "beam_width is 5, allowed is 1 to 4" in tokens.error_of(tokens.start(PROMPT, 2, beam_width=5))


@pytest.mark.feature("W-02")
def test_texts_of_beams_are_the_elements_of_one_output(server: TritonServer, oracle: PreTrainedModel) -> None:
    text = "def main("
    prompt = tokenizer_of_checkpoint().encode(text)
    ids, _ = searched(oracle, prompt, 2)
    body = {"text_input": text, "max_tokens": NEW, "beam_width": 2, "length_penalty": PENALTY, "end_id": -1}
    status, answer = post(f"{server.http_url}/v2/models/tensorrt_llm_bls/generate", {**body, "early_stopping": False})
    assert status == 200, answer
    assert json.loads(answer)["text_output"] == [tokenizer_of_checkpoint().decode([*prompt, *each]) for each in ids]


@cache
def tokenizer_of_checkpoint() -> Tokenizer:
    return Tokenizer.from_directory(str(CHECKPOINT))
