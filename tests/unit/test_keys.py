"""Chunk keys: the same everywhere, and different wherever KV would be."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.keys import EngineIdentity, chunk_keys, namespace, next_key, shareable_prefix
from workers.fingerprint import adapter_hash, model_id

TOKENS = list(range(1000, 1040))
IDENTITY = {
    "model": "org/model@0123456789abcdef0123456789abcdef01234567",
    "kv_dtype": "bfloat16",
    "layers": 30,
    "kv_heads": 3,
    "head_size": 64,
    "block_tokens": 4,
    "chunk_tokens": 8,
    "layout": "NHD",
    "platform": "cpu",
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "hf_overrides": {"a": 1, "b": [1, {"c": None}]},
}
OTHER = {
    "model": "org/model@ffffffffffffffffffffffffffffffffffffffff",
    "kv_dtype": "fp8_e4m3",
    "layers": 31,
    "kv_heads": 4,
    "head_size": 128,
    "block_tokens": 2,
    "chunk_tokens": 16,
    "layout": "HND",
    "platform": "cuda",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "quantization": "fp8",
    "kv_scales": "checkpoint",
    "rope_scaling": {"type": "yarn", "factor": 8.0},
    "hf_overrides": {"a": 1, "b": [1, {"c": 0}]},
    "format_version": 2,
}


def keys_of(adapter: str = "", salt: str = "", **changes: object) -> list[bytes]:
    identity = EngineIdentity(**{**IDENTITY, **changes})  # type: ignore[arg-type]
    return list(chunk_keys(namespace(identity.digest(), adapter, salt), TOKENS, identity.chunk_tokens))


def test_golden_vector() -> None:
    """Changing this empties every store in the field: raise FORMAT_VERSION if it must change."""
    identity = EngineIdentity(**IDENTITY)  # type: ignore[arg-type]
    assert identity.digest().hex() == "8aa3661698ddfeaaa9ccbd751f76bea7c6d31b48ab66eb4586c241e5b8497b3a"
    keys = keys_of("lora@1234", "tenant")
    assert [key.hex() for key in keys[:3]] == [
        "53037269a3b713e68ff9c05c0b473c7b2853dddf9ef92d46f97e0c0abdb59b51",
        "d4838b46093193aa5eaa254367a02c091d3a6816642d6620d051a0adf64a26b8",
        "ee4c47ad0fea75cc9b7f5dc63ec765a5fd48f8343a2d03ce552c97b06ca55887",
    ]


def test_two_interpreters_with_different_hash_seeds_make_the_same_keys() -> None:
    program = (
        f"import runpy; keys_of = runpy.run_path({__file__!r})['keys_of'];"
        "print([key.hex() for key in keys_of('lora@1', 'tenant')])"
    )

    def run(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    assert run("1") == run("4242") == f"{[key.hex() for key in keys_of('lora@1', 'tenant')]}\n"


@pytest.mark.parametrize("field", EngineIdentity.__struct_fields__)
def test_another_value_of_any_field_gives_disjoint_keys(field: str) -> None:
    assert not set(keys_of()) & set(keys_of(**{field: OTHER[field]}))


def test_another_adapter_or_salt_gives_disjoint_keys() -> None:
    names = [("", ""), ("lora@1", ""), ("lora@2", ""), ("", "lora@1"), ("", "tenant"), ("lora@1", "tenant")]
    seen = [set(keys_of(adapter, salt)) for adapter, salt in names]
    assert len(set().union(*seen)) == sum(len(keys) for keys in seen)


def test_adapter_and_salt_do_not_run_into_each_other() -> None:
    assert namespace(bytes(32), "ab", "c") != namespace(bytes(32), "a", "bc")


def test_changed_weights_behind_an_equal_config_give_disjoint_keys(tmp_path: Path) -> None:
    ids = []
    for name, weights in (("a", b"weights"), ("b", b"Weights")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
        ids.append(model_id(folder, cache_dir=tmp_path))
    assert not set(keys_of(model=ids[0])) & set(keys_of(model=ids[1]))


def test_changed_content_of_an_adapter_of_one_name_gives_disjoint_keys(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    names = []
    for weights in (b"weights", b"other weights"):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        names.append(f"lora@{adapter_hash(tmp_path, cache_dir=tmp_path)}")
    assert not set(keys_of(names[0])) & set(keys_of(names[1]))


def test_order_inside_a_mapping_does_not_matter() -> None:
    assert keys_of(hf_overrides={"a": 1, "b": 2}) == keys_of(hf_overrides={"b": 2, "a": 1})


def test_a_field_that_json_cannot_hold_is_named() -> None:
    with pytest.raises(ValueError, match="hf_overrides"):
        keys_of(hf_overrides={"dtype": object()})
    with pytest.raises(ValueError, match="rope_scaling"):
        keys_of(rope_scaling={"factor": float("nan")})


def test_a_chunk_is_a_whole_number_of_blocks() -> None:
    with pytest.raises(ValueError, match=r"chunk_tokens is 100.*16"):
        keys_of(block_tokens=16, chunk_tokens=100)


token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(token_lists, st.integers(1, 20))
def test_every_form_of_the_same_tokens_gives_the_same_keys(tokens: list[int], chunk: int) -> None:
    packed = array("I", tokens)
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    start = namespace(bytes(32))
    expected = chunk_keys(start, tokens, chunk)
    for form in (tuple(tokens), packed, memoryview(packed), raw, bytearray(raw), memoryview(raw)):
        assert chunk_keys(start, form, chunk) == expected
    assert len(expected) == len(tokens) // chunk


@given(token_lists, st.integers(1, 20))
def test_stepping_gives_the_keys_of_the_whole(tokens: list[int], chunk: int) -> None:
    previous, stepped = namespace(bytes(32)), []
    for start in range(0, len(tokens) - chunk + 1, chunk):
        previous = next_key(previous, tokens[start : start + chunk])
        stepped.append(previous)
    assert stepped == chunk_keys(namespace(bytes(32)), tokens, chunk)


@given(token_lists, st.data())
def test_a_changed_token_changes_the_keys_from_its_chunk_on_and_none_before(
    tokens: list[int], data: st.DataObject
) -> None:
    chunk = data.draw(st.integers(1, 8))
    full = len(tokens) // chunk
    if not full:
        return
    at = data.draw(st.integers(0, full * chunk - 1))
    changed = list(tokens)
    changed[at] ^= 1
    before, after = (chunk_keys(bytes(32), each, chunk) for each in (tokens, changed))
    assert before[: at // chunk] == after[: at // chunk]
    assert not set(before[at // chunk :]) & set(after)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["1"], b"\x00" * 5])
def test_what_is_not_a_token_is_refused(tokens: object) -> None:
    with pytest.raises(ValueError, match="token"):
        chunk_keys(bytes(32), tokens, 1)  # type: ignore[arg-type]


def test_the_shareable_prefix_ends_at_the_first_span() -> None:
    assert shareable_prefix(100, []) == 100
    assert shareable_prefix(100, [(60, 10), (40, 5)]) == 40
    assert shareable_prefix(100, [(0, 1)]) == 0
    assert shareable_prefix(100, [(40, 0), (200, 5)]) == 100
