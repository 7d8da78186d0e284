"""A post-processing process whose tokenizer raises for one token: `python -m tests.llm.raising_postproc` as the real one."""

from __future__ import annotations

import os
import socket

from backend.api.processes.arguments import arguments_of
from backend.text.tokenizer import Tokenizer
from compat.llm.postproc_process import PostprocArguments, serve
from compat.llm.postprocessing import Pipe, PostprocWorker

RAISES, ENDS = 13, 17  # token ids


class RaisingTokenizer(Tokenizer):
    def visible_token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        if token_id == RAISES:
            raise RuntimeError("planted")
        if token_id == ENDS:
            os._exit(1)
        return super().visible_token(token_id, skip_special_tokens)


def main() -> None:
    given = arguments_of(PostprocArguments)
    serve(Pipe(socket.socket(fileno=given.fd)), PostprocWorker(RaisingTokenizer.from_directory(given.tokenizer)))


if __name__ == "__main__":
    main()
