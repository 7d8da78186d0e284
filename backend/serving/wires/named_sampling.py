"""Sampling parameters given by name in a JSON object, as vLLM, OpenAI and this project's own model take them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import msgspec.inspect
from msgspec import Struct

from backend.api import InvalidRequest, SamplingConfig, Unsupported
from backend.api.errors import without_long_values
from backend.api.guide import A_CHOICE
from backend.api.sampling import PLAIN, SAMPLING_FIELDS
from backend.serving.intake.free_parameters import MAX_SHOWN, did_you_mean
from backend.serving.intake.requests import ServingContext
from backend.text.tokenizer import Tokenizer

MAX_NAMED = 4  # unknown names that one error lists
MAX_CHOICES = 128  # sequences for one prompt, as in OpenAI's API: the answer may hold the prompt so many times
_TOKEN_ID = re.compile(r"-?[0-9]{1,19}")
_PLACE = re.compile(r"\.(\w+)")  # a name in msgspec's path of an error
PLAIN_DEFAULTS: Mapping[str, float] = MappingProxyType({})
_EARLY_STOPPING: dict[bool | str, int] = {True: 1, False: 0, "never": 2}  # as the engine has it

if TYPE_CHECKING:
    _PlainFields = Struct
else:
    _PlainFields = msgspec.defstruct(
        "_PlainFields", [(field.name, float | None, None) for field in PLAIN], frozen=True, kw_only=True
    )


class NamedSampling(_PlainFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names, defaults and meaning follow vLLM's SamplingParams, as far as the engine knows them.

    Without a temperature there is sampling, at 1.0 or as the model's makers recommend; 0 is greedy. Without a seed each
    request has a random one. Of `best_of` sequences the `n` with the greatest log-probability are returned, the best first;
    with `use_beam_search` it is the number of beams.
    """

    max_tokens: int | None = None  # None: as many as fit
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 and -1: off
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None  # by token id
    logprobs: int | None = None  # most likely tokens of each position; 0: only the chosen one
    n: int = 1
    best_of: int | None = None  # None: n
    use_beam_search: bool = False
    length_penalty: float = 1.0  # beams only
    early_stopping: bool | Literal["never"] = False  # beams only

    @property
    def stops(self) -> list[str]:
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]

    @property
    def num_generated(self) -> int:
        """How many sequences the engine makes."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """True if the sequences are ordered by their log-probabilities, rather than as they were sampled."""
        return self.use_beam_search or self.num_generated > self.n

    def sampling_config(self, defaults: Mapping[str, float] = PLAIN_DEFAULTS) -> SamplingConfig:
        """`defaults`: values of fields that are not given, but with beams. Raises InvalidRequest for a token id in logit_bias
        that is no number.
        """
        if self.use_beam_search:
            return self._config(
                num_return_sequences=self.n,
                beam_width=self.num_generated,
                length_penalty=self.length_penalty,
                early_stopping=_EARLY_STOPPING[self.early_stopping],
                temperature=0.0 if self.num_generated == 1 else None,  # one beam is greedy decoding
            )
        left = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        asked = msgspec.structs.replace(self, **left)
        temperature = 1.0 if asked.temperature is None else asked.temperature
        return asked._config(
            num_return_sequences=self.num_generated if self.num_generated > 1 else None,
            temperature=temperature,
            seed=secrets.randbits(63) if self.seed is None and temperature != 0 else self.seed,
        )

    def _config(self, **given: Any) -> SamplingConfig:
        return SamplingConfig(
            **given,
            **{name: getattr(self, name) for name in _AS_GIVEN},
            top_k=None if self.top_k == -1 else self.top_k,
            min_tokens=self.min_tokens or None,
            logit_bias=_by_id(self.logit_bias) if self.logit_bias else None,
        )

    def end_ids(self, context: ServingContext, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Tokens that end the output: the model's own end ids unless they are to be ignored, then those of the request."""
        own = () if self.ignore_eos else (*context.model.eos_ids, *tokenizer.eos_ids)
        return tuple(dict.fromkeys([*own, *(self.stop_token_ids or [])]))


_WITH_A_RULE = "top_k temperature seed min_tokens logit_bias length_penalty early_stopping".split()
_AS_GIVEN = [  # the fields that reach the engine as they are
    field.name
    for field in SAMPLING_FIELDS
    if field.name in NamedSampling.__struct_fields__ and field.name not in _WITH_A_RULE
]


def check_choices(asked: NamedSampling, streaming: bool) -> None:
    """Raise InvalidRequest or Unsupported for impossible numbers of sequences, and for fields that only beams heed."""
    for name, value in (("n", asked.n), ("best_of", asked.best_of)):
        if value is not None and not 1 <= value <= MAX_CHOICES:
            raise InvalidRequest(f"{name} is {value}, allowed is 1 to {MAX_CHOICES}; send several requests")
    if asked.num_generated < asked.n:
        raise InvalidRequest(f"best_of is {asked.best_of}, the least is n, which is {asked.n}; raise it")
    if streaming and asked.is_ranked:
        name = "use_beam_search" if asked.use_beam_search else "best_of"
        raise Unsupported(
            f"{name} cannot be had in a stream, because the sequences are chosen at its end; leave stream out"
        )
    if asked.use_beam_search:
        _check_beams(asked)
    elif asked.early_stopping is not False or asked.length_penalty != 1.0:
        name = "length_penalty" if asked.early_stopping is False else "early_stopping"
        raise InvalidRequest(
            f"{name} is {getattr(asked, name)}, which only beams heed; set use_beam_search, or leave it out"
        )


def _check_beams(asked: NamedSampling) -> None:
    if asked.temperature not in (None, 0.0, 1.0):
        raise Unsupported(
            f"temperature is {asked.temperature}, and beams are ranked by the model's own probabilities; set it to 0"
        )
    if asked.logprobs:
        raise Unsupported(
            f"logprobs is {asked.logprobs}; beams have no log-probabilities of other tokens than their own, set it to 0"
        )
    if asked.stops:
        raise Unsupported("stop cannot be had with use_beam_search in this version; use stop_token_ids, or no beams")


def _by_id(bias: dict[str, float]) -> dict[int, float]:
    wrong = next((token_id for token_id in bias if _TOKEN_ID.fullmatch(token_id) is None), None)
    if wrong is not None:
        raise InvalidRequest(f"logit_bias holds the key {wrong[:40]!r}, token ids are expected")
    return {int(token_id): weight for token_id, weight in bias.items()}


def read_json(name: str, text: str, kind: type[Any], strict: bool = True) -> Any:
    """`text` as a `kind` of Struct. Raises InvalidRequest naming what is wrong; not strict: numbers may be strings."""
    return from_json(name, json_value(name, text), kind, strict)


def json_value(name: str, text: str) -> Any:
    """Raises InvalidRequest."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"{name} is not valid JSON; send one JSON object") from None


def from_json(name: str, value: Any, kind: type[Any], strict: bool = True) -> Any:
    """A JSON value as a `kind` of Struct; see read_json."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except (msgspec.ValidationError, RecursionError) as error:
        if isinstance(value, dict) and (unknown := sorted(set(value) - set(kind.__struct_fields__))):
            raise Unsupported(f"{name}: {_unknown(unknown, kind)}; leave out what is not known") from None
        raise InvalidRequest(_sentence(name, error, kind)) from None


def _unknown(names: list[str], kind: type[Any]) -> str:
    """The first of the names, each with the parameter that was probably meant."""
    return "; ".join(
        f"{name[:MAX_SHOWN]!r} is no known parameter{did_you_mean(name, kind.__struct_fields__)}"
        for name in names[:MAX_NAMED]
    )


def _sentence(name: str, error: Exception, kind: type[Any]) -> str:
    """msgspec's sentence, with the place in front and the allowed names behind it. It repeats no value except an
    enumeration's.
    """
    problem, _, place = str(error).partition(" - at `$")
    place = place.rstrip("`")
    choices = _choices(msgspec.inspect.type_info(kind), _PLACE.findall(place)) if place else ""
    hint = f"; {A_CHOICE}" if place == ".guide.type" and "'choice'" in problem else ""
    return f"{name}{place}: {problem[:1].lower()}{without_long_values(problem)[1:]}{choices}{hint}"


def _choices(found: msgspec.inspect.Type, path: list[str]) -> str:
    """The choices at a path of names: the keys of an object, or the values of an enumeration; '' for anything else."""
    if isinstance(found, msgspec.inspect.UnionType):
        return next((text for each in found.types if (text := _choices(each, path))), "")
    if isinstance(found, msgspec.inspect.StructType):
        inner = {field.encode_name: field.type for field in found.fields}
        return _choices(inner[path[0]], path[1:]) if path else f"; its keys are {', '.join(inner)}"
    if isinstance(found, msgspec.inspect.EnumType):
        return f"; allowed are {', '.join(each.value for each in found.cls)}"
    return ""
