"""One HTTP request from a host, and its answer as JSON. There is no way to a lab's hosts from the tests' own process.

python ask_http.py METHOD URL BEARER BODY
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 120.0


def ask(method: str, url: str, bearer: str, body: str) -> dict[str, object]:
    """`status` 0 where nobody answered; `text` says why."""
    request = urllib.request.Request(url, body.encode() or None, method=method)
    request.add_header("content-type", "application/json")
    if bearer:
        request.add_header("authorization", f"Bearer {bearer}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return _told(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        return _told(error.code, error.headers, error.read())
    except OSError as error:
        return {"status": 0, "headers": {}, "text": str(error)}


def _told(status: int, headers: object, body: bytes) -> dict[str, object]:
    named = {name.lower(): value for name, value in dict(headers).items()}  # type: ignore[call-overload]
    return {"status": status, "headers": named, "text": body.decode(errors="replace")}


if __name__ == "__main__":
    print(json.dumps(ask(*sys.argv[1:])))
