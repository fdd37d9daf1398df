"""What a model is, by content; and that large files are read once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from workers.fingerprint import CACHE_FILE, FingerprintError, adapter_hash, model_id, weights_hash

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 1}')
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"first")
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"second")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Reads:
    """A progress callback that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
def test_changed_content_is_another_model(model: Path, cache: Path, name: str) -> None:
    before = model_id(model, cache_dir=cache)
    (model / name).write_bytes(b'{"layers": 2}')
    assert model_id(model, cache_dir=cache) != before


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "generation_config.json", "optimizer.bin"])
def test_what_kv_does_not_depend_on_takes_no_part(model: Path, cache: Path, name: str) -> None:
    before = model_id(model, cache_dir=cache)
    (model / name).write_bytes(b"other")
    assert model_id(model, cache_dir=cache) == before


def test_code_of_a_model_takes_part(model: Path, cache: Path) -> None:
    before = model_id(model, cache_dir=cache)
    (model / "modeling_own.py").write_text("rotary = None")
    assert model_id(model, cache_dir=cache) != before


def test_swapped_shards_are_another_model(model: Path, cache: Path) -> None:
    before = model_id(model, cache_dir=cache)
    (model / "model-00001-of-00002.safetensors").write_bytes(b"second")
    (model / "model-00002-of-00002.safetensors").write_bytes(b"first")
    assert model_id(model, cache_dir=cache) != before


def test_weights_under_another_name_are_another_model(model: Path, cache: Path) -> None:
    before = model_id(model, cache_dir=cache)
    (model / "model-00002-of-00002.safetensors").rename(model / "model.safetensors")
    assert model_id(model, cache_dir=cache) != before


def test_a_moved_model_is_the_same_model(model: Path, cache: Path, tmp_path: Path) -> None:
    before = model_id(model, cache_dir=cache)
    assert before.startswith("local:")
    assert model_id(model.rename(tmp_path / "elsewhere"), cache_dir=tmp_path / "other") == before


def test_a_gguf_file_is_a_model_under_any_name(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    before = model_id(file, cache_dir=cache)
    assert model_id(file.rename(tmp_path / "renamed.gguf"), cache_dir=cache) == before
    (tmp_path / "renamed.gguf").write_bytes(b"changed")
    assert model_id(tmp_path / "renamed.gguf", cache_dir=cache) != before


def test_progress_counts_up_to_the_bytes_to_read(model: Path, cache: Path) -> None:
    reads = Reads()
    model_id(model, cache_dir=cache, progress=reads)
    size = len(b"first") + len(b"second") + len('{"layers": 1}')
    assert reads.calls[-1] == (size, size)
    assert reads.calls == sorted(reads.calls)


def test_known_files_are_not_read_again(model: Path, cache: Path) -> None:
    first = model_id(model, cache_dir=cache)
    reads = Reads()
    assert model_id(model, cache_dir=cache, progress=reads) == first
    assert reads.calls == []


def test_a_file_of_equal_size_and_another_mtime_is_read_again(model: Path, cache: Path) -> None:
    before = model_id(model, cache_dir=cache)
    shard = model / "model-00001-of-00002.safetensors"
    then = shard.stat().st_mtime_ns
    shard.write_bytes(b"FIRST")
    os.utime(shard, ns=(then + 1, then + 1))
    reads = Reads()
    assert model_id(model, cache_dir=cache, progress=reads) != before
    assert reads.calls == [(5, 5)]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1, "files": 3}', '{"version": 99}', "null"])
def test_a_cache_that_makes_no_sense_is_ignored_and_replaced(model: Path, cache: Path, content: str) -> None:
    expected = model_id(model, cache_dir=cache)
    (cache / CACHE_FILE).write_text(content)
    assert model_id(model, cache_dir=cache) == expected
    assert len(json.loads((cache / CACHE_FILE).read_text())["files"]) == 3


def test_an_entry_of_the_cache_that_makes_no_sense_is_ignored(model: Path, cache: Path) -> None:
    expected = model_id(model, cache_dir=cache)
    data = json.loads((cache / CACHE_FILE).read_text())
    for number, path in enumerate(data["files"]):
        data["files"][path] = [7, "text", {**data["files"][path], "blake3": "zz"}][number]
    (cache / CACHE_FILE).write_text(json.dumps(data))
    assert model_id(model, cache_dir=cache) == expected


def test_the_cache_is_written_whole_and_leaves_nothing_beside_it(model: Path, cache: Path) -> None:
    model_id(model, cache_dir=cache)
    assert [path.name for path in cache.iterdir()] == [CACHE_FILE]


def test_a_cache_that_cannot_be_written_is_no_failure(model: Path, cache: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert model_id(model, cache_dir=blocked) == model_id(model, cache_dir=cache)


def test_a_snapshot_of_the_hub_is_known_by_its_commit_and_not_read(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "models--org--some--name" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    assert model_id(folder, cache_dir=cache) == f"org/some--name@{COMMIT}"
    assert not cache.exists()


def test_a_folder_that_only_looks_like_a_snapshot_is_read(model: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "models--org--name" / "snapshots").mkdir(parents=True)
    moved = model.rename(tmp_path / "models--org--name" / "snapshots" / "main")
    assert model_id(moved, cache_dir=cache).startswith("local:")


def test_a_hub_id_is_known_by_the_commit_that_its_revision_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    references = tmp_path / "models--org--name" / "refs"
    references.mkdir(parents=True)
    (references / "main").write_text(COMMIT)
    assert model_id("org/name") == f"org/name@{COMMIT}"
    assert model_id("org/name", revision="f" * 40) == f"org/name@{'f' * 40}"
    with pytest.raises(FingerprintError, match=r"org/other.*models--org--other"):
        model_id("org/other")


def test_a_folder_without_weights_is_an_error_that_says_what_was_needed(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FingerprintError, match="safetensors"):
        weights_hash(tmp_path, cache_dir=cache)


def test_an_adapter_is_known_by_its_weights_and_config(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    hashes = set()
    for config, weights in (("{}", b"a"), ("{}", b"b"), ('{"r": 8}', b"b")):
        (folder / "adapter_config.json").write_text(config)
        (folder / "adapter_model.safetensors").write_bytes(weights)
        hashes.add(adapter_hash(folder, cache_dir=cache))
    assert len(hashes) == 3
    (folder / "README.md").write_text("about")
    assert adapter_hash(folder, cache_dir=cache) in hashes


def test_a_folder_that_is_no_adapter_is_an_error(model: Path, cache: Path) -> None:
    with pytest.raises(FingerprintError, match=r"adapter_config\.json"):
        adapter_hash(model, cache_dir=cache)
