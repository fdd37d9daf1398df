"""Streamed chats from a host, one after the other from several clients, until a file is there.

python chat_traffic.py URL BEARER CLIENTS STOP_FILE

Prints a line for each: `answered REPLICA`, or `failed` and why.
"""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

ANSWERED, FAILED = "answered", "failed"
END = b"data: [DONE]\n\n"


def main(url: str, bearer: str, clients: int, stop: Path) -> None:
    numbers = itertools.count()

    def run() -> None:
        headers = {"authorization": f"Bearer {bearer}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
            while not stop.exists():
                print(_chat(http, f"{next(numbers)} asks"), flush=True)

    with ThreadPoolExecutor(clients) as threads:
        for client in [threads.submit(run) for _ in range(clients)]:
            client.result()


def _chat(http: httpx.Client, text: str) -> str:
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 20,
        "stream": True,
    }
    try:
        answer = http.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        return f"{FAILED} {error!r}"
    if answer.status_code == 200 and answer.content.endswith(END):
        return f"{ANSWERED} {answer.headers['x-manta-replica']}"
    return f"{FAILED} {answer.status_code} {answer.text[-200:]!r}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
