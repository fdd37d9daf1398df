"""An S3 server on loopback that a test starts: nanio, which keeps objects as files and checks signatures."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

BUCKET = "chunks"
REGION = "us-east-1"


class S3Server:
    """`environment` is what a process needs to use it: set it before the file system is made."""

    def __init__(
        self, folder: Path, process: subprocess.Popen[bytes], port: int, access: str, secret: str
    ) -> None:
        self.bucket = folder / BUCKET
        """Objects are files in here, under their keys."""
        self.port = port
        self.environment = {
            "AWS_ACCESS_KEY_ID": access,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_EC2_METADATA_DISABLED": "true",
            # Trailing checksums are newer than this server.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        }
        self._process = process

    def uri(self, prefix: str = "prefix", **options: str) -> str:
        """Of a remote tier in the bucket."""
        options = {
            "endpoint_override": f"http://127.0.0.1:{self.port}",
            "scheme": "http",
            "region": REGION,
        } | options
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in options.items())
        return f"s3://{BUCKET}/{prefix}?{query}"

    def pause(self) -> None:
        """Connections are taken and get no answer."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """With an empty bucket, ready. It keeps its files in `folder`."""
    (folder / BUCKET).mkdir(parents=True)
    access, secret = "manta", secrets.token_hex(16)
    port = _free_port()
    environment = os.environ | {"NANIO_ACCESS_KEY": access, "NANIO_SECRET_KEY": secret}
    command = [sys.executable, "-m", "nanio", "serve", "--data-dir", str(folder), "--host", "127.0.0.1"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--region", REGION], stdout=log, stderr=log, env=environment
        )
    server = S3Server(folder, process, port, access, secret)
    try:
        _wait_until_ready(process, port, folder / "log")
        yield server
    finally:
        server.resume()
        server.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the S3 server did not start:\n{log.read_text()}")
        time.sleep(0.05)
