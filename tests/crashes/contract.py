"""A request for each field of Request, SamplingConfig, OutputConfig and SessionConfig that gives the field something to do.

docs/replay.md is the contract: its tables say of every field what happens to it when the engine dies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from backend.api import OutputConfig, Request, SamplingConfig, SessionConfig
from backend.api.guide import Guide, GuideType, Thinking
from backend.api.images import ImageInput
from backend.api.lora import LoraConfig
from backend.api.outputs import AdditionalOutput
from backend.api.request import RetentionConfig, TokenRangeRetention
from backend.api.sampling import PLAIN
from backend.api.tensor import TensorData

PROMPT = [40, 300, 17, 923, 40, 300, 17]
MAX_TOKENS = 14
EXACT, ANEW, REFUSED, NOT_APPLICABLE = "replayed exactly", "run again", "refused", "not applicable"
WAYS = (EXACT, ANEW, REFUSED, NOT_APPLICABLE)
STRUCTS: dict[str, type[Struct]] = {
    "Request": Request,
    "SamplingConfig": SamplingConfig,
    "OutputConfig": OutputConfig,
    "SessionConfig": SessionConfig,
}
HIDDEN = 256  # of the default model
SEEDED = dict(temperature=1.2, top_k=50, seed=11)


def plain(**fields: Any) -> Request:
    return Request(**{"input_token_ids": PROMPT, "max_tokens": MAX_TOKENS, "streaming": True} | fields)


def sampled(**fields: Any) -> Request:
    return plain(sampling_config=SamplingConfig(**fields))


def output(**fields: Any) -> Request:
    return plain(output_config=OutputConfig(**fields))


def turn(**fields: Any) -> Request:
    """A later turn: `cases` comes with the turn that begins its session."""
    return plain(input_token_ids=[5, 6], session=SessionConfig(**fields))


def cases(adapter: Path) -> dict[str, Request]:
    """By `Struct.field`."""
    numbers = TensorData("float32", (2, HIDDEN), (b"\x00\x00\x80\x3d" + b"\x00\x00\x00\xbd") * HIDDEN)
    of_requests = {
        "input_token_ids": plain(input_token_ids=list(range(50, 140))),
        "max_tokens": plain(max_tokens=9),
        "streaming": plain(streaming=False),
        "sampling_config": sampled(**SEEDED),
        "output_config": output(return_log_probs=True),
        "end_ids": plain(end_ids=tuple(range(0, 4096, 24)), sampling_config=SamplingConfig(min_tokens=6)),
        "stop_words": plain(
            stop_words=[[token] for token in range(0, 4096, 34)], sampling_config=SamplingConfig(min_tokens=5)
        ),
        "bad_words": plain(bad_words=[[token] for token in range(0, 4096, 40)]),
        "client_id": plain(client_id=77),
        "return_all_generated_tokens": plain(return_all_generated_tokens=True),
        "session": turn(id=101),
        "timeout_s": plain(timeout_s=300.0),
        "cache_salt": plain(cache_salt="tenant"),
        "extra_inputs": plain(extra_inputs={"image": b"123"}),
        "priority": plain(priority=0.9),
        "retention": plain(retention=RetentionConfig((TokenRangeRetention(0, 4, 90),))),
        "logits_post_processor": plain(logits_post_processor="shift"),
        "prompt_embeddings": plain(input_token_ids=[4096, 4097, 5, 6], prompt_embeddings=numbers),
        "position_ids": plain(position_ids=[0, 1, 2, 5, 6, 7, 9]),
        "extra_ids": plain(extra_ids=[0, 0, 7, 7, 0, 0, 0]),
        "guide": plain(guide=Guide(GuideType.REGEX, "[a-z]{3,40}[0-9]{2}"), max_tokens=30),
        "thinking": plain(thinking=Thinking((40, 41), max_tokens=12), max_tokens=30),
        "lora": plain(lora=LoraConfig(5, path=str(adapter))),
        "draft_tokens": plain(draft_tokens=[9, 9, 9, 9, 9, 9]),
        "ends_after_drafts": plain(draft_tokens=[9, 9, 9, 9, 9, 9], ends_after_drafts=True),
        "speculation": plain(speculation=False),
        "max_draft_tokens": plain(max_draft_tokens=2),
        "context_only": plain(context_only=True),
        "images": plain(images=(ImageInput(5, 1, "00" * 32, {}),)),
        "kv_state": plain(),  # the test puts the state in that a context_only request has given
    }
    of_sampling = {
        **{field.name: sampled(**{field.name: field.plain}, temperature=1.5, seed=1) for field in PLAIN},
        "beam_width": sampled(beam_width=3),
        "num_return_sequences": sampled(num_return_sequences=3, **SEEDED),
        "temperature": sampled(temperature=0.8, top_k=20, seed=2),
        "top_k": sampled(top_k=7, temperature=1.5, seed=1),
        "top_p": sampled(top_p=0.9, temperature=1.5, seed=1),
        "seed": sampled(temperature=1.5, seed=1 << 63),
        "presence_penalty": sampled(presence_penalty=1.5),
        "frequency_penalty": sampled(frequency_penalty=1.5),
        "min_tokens": plain(sampling_config=SamplingConfig(min_tokens=8), end_ids=tuple(range(0, 4096, 17))),
        "logit_bias": sampled(logit_bias={40: 5.0, 41: 5.0}),
        "length_penalty": sampled(beam_width=2, length_penalty=1.3),
        "early_stopping": sampled(beam_width=2, early_stopping=0),
        "beam_search_diversity_rate": sampled(beam_width=2, beam_search_diversity_rate=0.7),
        "no_repeat_ngram_size": sampled(no_repeat_ngram_size=2),
        "top_p_decay": sampled(top_p=0.95, top_p_decay=0.8, temperature=1.5, seed=3),
        "top_p_min": sampled(top_p=0.95, top_p_decay=0.5, top_p_min=0.3, temperature=1.5, seed=3),
        "top_p_reset_ids": sampled(top_p=0.95, top_p_decay=0.5, top_p_reset_ids=5, temperature=1.5, seed=3),
        "beam_width_array": sampled(beam_width=2, beam_width_array=[2, 3]),
    }
    of_outputs = {
        "return_log_probs": output(return_log_probs=True),
        "top_log_probs": output(top_log_probs=3, return_log_probs=True),
        "prompt_log_probs": output(prompt_log_probs=2),
        "prompt_hidden_states": output(prompt_hidden_states="last"),
        "prompt_logits_of": output(prompt_logits_of=(3, 5)),
        "exclude_input_from_output": plain(streaming=False, output_config=OutputConfig(exclude_input_from_output=True)),
        "return_perf_metrics": output(return_perf_metrics=True),
        "return_context_logits": output(return_context_logits=True),
        "return_generation_logits": output(return_generation_logits=True),
        "additional_outputs": output(additional_outputs=(AdditionalOutput("hidden_states", gather_context=True),)),
        "return_history": plain(session=SessionConfig(102), output_config=OutputConfig(return_history=True)),
    }
    of_sessions = {
        "id": turn(id=103),
        "start": turn(id=104, start=True),
        "end": turn(id=105, end=True),
        "step": turn(id=106, step=3),
        "session_len": turn(id=107, session_len=24),
        "full_history": plain(input_token_ids=[*PROMPT, 1, 2, 3, 4, 5], session=SessionConfig(108, full_history=True)),
    }
    groups = zip(STRUCTS, (of_requests, of_sampling, of_outputs, of_sessions), strict=True)
    return {f"{name}.{field}": request for name, group in groups for field, request in group.items()}
