"""What a model is, by content: two folders with equal configs and different weights must not share KV.

Of a model's folder these files, directly in it, take part:

- weights: `*.safetensors`, `*.bin`, `*.pt`, `*.pth`, `*.gguf`, without what only training needs
  (`training_args.*`, `optimizer.*`, `scheduler.*`, `rng_state*`);
- what says how they are computed with: `config.json`, `params.json` (Mistral's format),
  `quantize_config.json`, `quant_config.json`, `hf_quant_config.json`, `*.py` (models that bring their code).

Everything else is left out, for it changes which tokens go in or come out and not the KV that they get:
tokenizer, chat template, generation_config.json, weight index, README, and so on. A folder of the hub's
cache, `models--ORG--NAME/snapshots/COMMIT`, is known by id and commit, and none of it is read.

Hashes of files are kept in a cache by path, size and mtime, so that tens of gigabytes are read once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes to read in all; files whose hash is known are in neither."""

CACHE_FILE = "fingerprints.json"
_CACHE_VERSION = 1
_PIECE_BYTES = 16 * 1024 * 1024
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_TRAINING = re.compile(r"(training_args|optimizer|scheduler|rng_state).*")
_CONFIGS = frozenset(
    {"config.json", "params.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json"}
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class FingerprintError(ValueError):
    """There is nothing to take a fingerprint of. The message says what was looked for, where."""


def default_cache_dir() -> Path:
    """`manta` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta"


def model_id(
    path: str | Path,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> str:
    """`id@commit` for a model of the hub, `local:<hash of the weights>` for any other folder or single file.

    `path` is a folder, a file (GGUF), or a hub id whose `revision` (a commit, branch or tag; `main` where not
    given) is in the hub's local cache. Raises FingerprintError where there is no such thing, OSError where a
    file can't be read.
    """
    folder = Path(path)
    if not folder.exists():
        return _hub_id(str(path), revision)
    return _snapshot_id(folder) or f"local:{weights_hash(folder, cache_dir=cache_dir, progress=progress)}"


def weights_hash(path: str | Path, *, cache_dir: Path | None = None, progress: Progress | None = None) -> str:
    """64 hex digits: BLAKE3 over the names and contents of a model's files, or over one file's content."""
    path = Path(path)
    if path.is_file():
        return _hash_files([path], cache_dir, progress)
    weights, configs = _weights(path), [p for p in _files(path) if p.name in _CONFIGS or p.suffix == ".py"]
    if not weights:
        raise FingerprintError(f"{path}: no weights; needed: a file *{', *'.join(sorted(_WEIGHTS))}")
    return _hash_files(weights + configs, cache_dir, progress)


def adapter_hash(path: str | Path, *, cache_dir: Path | None = None, progress: Progress | None = None) -> str:
    """32 hex digits: the content of a LoRA adapter in PEFT's layout, `adapter_config.json` and weights."""
    path = Path(path)
    config, weights = path / "adapter_config.json", _weights(path)
    if not config.is_file() or not weights:
        raise FingerprintError(
            f"{path}: not a LoRA adapter; needed: adapter_config.json and a file with weights"
        )
    return _hash_files([*weights, config], cache_dir, progress)[:32]


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.is_file()] if folder.is_dir() else []


def _weights(folder: Path) -> list[Path]:
    return [p for p in _files(folder) if p.suffix in _WEIGHTS and not _TRAINING.fullmatch(p.name)]


def _snapshot_id(folder: Path) -> str | None:
    """Id and commit of a folder of the hub's cache; None for any other."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    if not _COMMIT.fullmatch(folder.name):
        return None
    return f"{repository.removeprefix('models--').replace('--', '/', 1)}@{folder.name}"


def _hub_id(name: str, revision: str | None) -> str:
    """Id and commit of a model in the hub's local cache. `ORG/NAME:FILE` picks a file, as in vLLM."""
    if revision and _COMMIT.fullmatch(revision):
        return f"{name}@{revision}"
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = "models--" + name.partition(":")[0].replace("/", "--")
    reference = Path(HF_HUB_CACHE) / repository / "refs" / (revision or "main")
    if not reference.is_file():
        raise FingerprintError(
            f"{name}: neither a folder or file nor a downloaded model of the hub (looked for {reference})"
        )
    return f"{name}@{reference.read_text(encoding='utf-8').strip()}"


class _Stamp(NamedTuple):
    """What a file's hash is remembered by."""

    path: str
    size: int
    mtime_ns: int


def _stamp(path: Path) -> _Stamp:
    path = path.resolve()
    status = path.stat()
    return _Stamp(str(path), status.st_size, status.st_mtime_ns)


def _hash_files(paths: Iterable[Path], cache_dir: Path | None, progress: Progress | None) -> str:
    """A single file's name takes no part, so that a moved GGUF stays the same model."""
    files = sorted(paths, key=lambda path: path.name)
    cache = _Cache((cache_dir or default_cache_dir()) / CACHE_FILE)
    unknown = [path for path in files if cache.get(_stamp(path)) is None]
    done, total = 0, sum(path.stat().st_size for path in unknown)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    combined = blake3(b"manta weights")
    for path in files:
        stamp = _stamp(path)
        digest = cache.get(stamp)
        if digest is None:
            digest = _hash_file(path, advance)
            if _stamp(path) == stamp:
                cache.put(stamp, digest)
        name = path.name.encode() if len(files) > 1 else b""
        combined.update(len(name).to_bytes(8, "little") + name + bytes.fromhex(digest))
    cache.save()
    return combined.hexdigest()


def _hash_file(path: Path, advance: Callable[[int], None]) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    piece = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            hasher.update(piece[:count])
            advance(count)
    return hasher.hexdigest()


class _Cache:
    """Hashes of files in one JSON file.

    Several processes may use it: the last one to write wins, and what is lost is computed again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new: dict[str, dict[str, Any]] = {}
        self._known = self._read()

    def get(self, stamp: _Stamp) -> str | None:
        entry = self._new.get(stamp.path) or self._known.get(stamp.path)
        if not isinstance(entry, dict) or (entry.get("size"), entry.get("mtime_ns")) != stamp[1:]:
            return None
        digest = entry.get("blake3")
        return digest if isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest) else None

    def put(self, stamp: _Stamp, digest: str) -> None:
        self._new[stamp.path] = {"size": stamp.size, "mtime_ns": stamp.mtime_ns, "blake3": digest}

    def save(self) -> None:
        """A cache that can't be written costs time at the next start, not this one."""
        if not self._new:
            return
        content = json.dumps({"version": _CACHE_VERSION, "files": {**self._read(), **self._new}}, indent=1)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=f".{CACHE_FILE}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(content)
                os.replace(temporary, self._path)
            except OSError:
                os.unlink(temporary)
                raise

    def _read(self) -> dict[str, Any]:
        """Empty where there is none, or none that can be understood."""
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(data, dict) or data.get("version") != _CACHE_VERSION:
            return {}
        files = data.get("files")
        return files if isinstance(files, dict) else {}
