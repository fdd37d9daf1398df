"""From the URI of a remote tier to a file system of pyarrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

OBJECT_STORES = frozenset({"s3", "gs", "gcs"})
"""Schemes of stores without folders, where a file appears whole when it is closed."""
S3_OPTIONS = frozenset(
    {
        "region",
        "endpoint_override",
        "scheme",
        "connect_timeout",
        "tls_ca_file_path",
        "allow_bucket_creation",
        "force_virtual_addressing",
        "anonymous",
    }
)
"""What the query of an s3:// URI may say; named as in pyarrow.fs.S3FileSystem."""
_SWITCHES = frozenset({"allow_bucket_creation", "force_virtual_addressing", "anonymous"})
_ATTEMPTS = 1
"""What fails is a miss, and a process can't end before the SDK has given up: with its default that takes a minute and
a half where a server does not answer."""
_GCS_RETRY_S = 5

HINTS = {
    "s3": "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or the machine's role, on every "
    "node. A store that does not know trailing checksums needs AWS_REQUEST_CHECKSUM_CALCULATION=when_required.",
    "gs": "Credentials come from GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login` or the "
    "machine's service account, on every node; gs://anonymous@bucket/prefix uses none.",
    "file": "The folder must be there, or creatable, and writable on every node.",
}
"""What to look at where a store of the scheme can't be used."""


class RemotePlace(NamedTuple):
    files: FileSystem
    root: str
    """Path within `files`."""
    shown: str
    """The URI for people: without password and query."""
    scheme: str

    @property
    def has_folders(self) -> bool:
        return self.scheme not in OBJECT_STORES


def open_remote(uri: str) -> RemotePlace:
    """Asks nothing of the store yet. Raises ValueError for a URI that can't be one of a remote tier."""
    parts = urlsplit(uri)
    shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    if not parts.scheme or not parts.netloc + parts.path.strip("/"):
        raise ValueError(f"{shown!r}: needed: s3://bucket/prefix, gs://bucket/prefix or file:///folder")
    try:
        files, root = _open_s3(parts) if parts.scheme == "s3" else _open_any(parts)
    except ImportError as error:
        raise ValueError(f"{shown}: a remote tier needs pyarrow, which is not installed") from error
    except (OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{shown} is no place for chunks: {error}") from error
    return RemotePlace(files, root.rstrip("/"), shown, "gs" if parts.scheme == "gcs" else parts.scheme)


def _open_s3(parts: SplitResult) -> tuple[FileSystem, str]:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    options: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - S3_OPTIONS):
        raise ValueError(f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(S3_OPTIONS))}")
    for name in options.keys() & _SWITCHES:
        options[name] = options[name].lower() in ("1", "true", "yes")
    if "connect_timeout" in options:
        options["connect_timeout"] = float(options["connect_timeout"])
    if parts.username:
        options |= {"access_key": unquote(parts.username), "secret_key": unquote(parts.password or "")}
    # With the delayed open a part goes out as one request.
    files = S3FileSystem(
        **options, allow_delayed_open=True, retry_strategy=AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS)
    )
    return files, f"{parts.hostname}{unquote(parts.path)}"


def _open_any(parts: SplitResult) -> tuple[FileSystem, str]:
    from pyarrow.fs import FileSystem

    if parts.scheme in OBJECT_STORES and "retry_limit_seconds" not in parts.query:
        # The library's own limit is a quarter of an hour.
        query = f"{parts.query}&" if parts.query else ""
        parts = parts._replace(query=f"{query}retry_limit_seconds={_GCS_RETRY_S}")
    files, root = FileSystem.from_uri(parts.geturl())
    return files, root
