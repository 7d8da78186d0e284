"""A post-processing process whose tokenizer raises for one token: `python -m tests.llm.raising_postproc` as the real one."""

from __future__ import annotations

import argparse
import os
import socket

from backend.text.tokenizer import Tokenizer
from compat.llm.postproc_process import serve
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--tokenizer")
    given = parser.parse_args()
    serve(Pipe(socket.socket(fileno=given.fd)), PostprocWorker(RaisingTokenizer.from_directory(given.tokenizer)))


if __name__ == "__main__":
    main()
