"""How many of the default model's finished answers satisfy their schema: sampled or beams, some cancelled."""

from __future__ import annotations

import json

import jsonschema  # type: ignore[import-untyped]

from backend.api import OutputConfig, Request, SamplingConfig
from backend.api.guide import Guide, GuideType
from backend.api.response import FinishReason
from backend.text.tokenizer import Tokenizer
from benchmarks.guides.engine import Bench
from benchmarks.guides.schemas import SCHEMAS

MAX_TOKENS = 400
POOL_TOKENS = 4096  # for 16 rows of up to 432 tokens: they do not all fit at once


def count(model: str, wanted: int) -> str:
    tokenizer = Tokenizer.from_directory(model)
    bench = Bench(model, 16, POOL_TOKENS)
    schemas: dict[int, int] = {}
    finished = valid = cut = cancelled = failed = sent = 0
    wrong: list[str] = []
    while finished < wanted:
        while bench.core.num_live < 24:
            sent += 1
            which = sent % len(SCHEMAS)
            beams = sent % 10 == 0
            sampling = SamplingConfig(beam_width=3) if beams else SamplingConfig(temperature=1.0, seed=sent)
            request = Request(
                tokenizer.encode(f"Answer {sent}: "),
                MAX_TOKENS,
                sampling_config=sampling,
                output_config=OutputConfig(exclude_input_from_output=True),
                end_ids=tokenizer.eos_ids,
                guide=Guide(GuideType.JSON_SCHEMA, json.dumps(SCHEMAS[which])),
            )
            schemas[bench.send(request)] = which
            if sent % 17 == 0:
                bench.core.cancel(max(schemas) - 5)  # type: ignore[arg-type]
        for response in bench.turn():
            result = response.result_or_none
            if result is None:
                failed += 1
                wrong.append(str(response.error_or_none))
                continue
            for ids, reason in zip(result.output_token_ids, result.finish_reasons):
                if reason is not FinishReason.END_ID:
                    cut += reason is FinishReason.LENGTH
                    cancelled += reason is FinishReason.CANCELLED
                    continue
                finished += 1
                text = tokenizer.decode(ids)
                try:
                    jsonschema.validate(json.loads(text), SCHEMAS[schemas[response.request_id]])
                    valid += 1
                except (ValueError, jsonschema.ValidationError) as error:
                    wrong.append(f"{text!r}: {error}")
    evictions = bench.core.kv.stats()
    bench.core.workers.shutdown()
    head = (
        f"{finished} finished answers, {valid} satisfy their schema; {cut} were cut at {MAX_TOKENS} tokens, {cancelled} were "
        f"cancelled, {failed} failed; recomputed tokens {bench.core.counters.recomputed_tokens_total}; {evictions}"
    )
    return "\n".join([head, *wrong[:20]])
