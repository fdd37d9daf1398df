"""Where parts lie: every part has one path, and no other path is taken for a part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.chunk_path import is_temporary, parse_path, part_path, temporary_name
from cache_store.events import ChunkKey

IDENTITY = bytes(range(32))
KEY = ChunkKey(bytes(range(100, 132)))
PATH = str(part_path(IDENTITY, KEY, 0))


def test_a_path_names_identity_key_and_rank() -> None:
    assert f"0001020304050607/64/{KEY.hex()}.0.kv" == PATH
    assert str(part_path(IDENTITY, KEY, 12)).endswith(f"/{KEY.hex()}.12.kv")


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.integers(0, 99999))
def test_a_path_reads_back(identity: bytes, key: bytes, rank: int) -> None:
    part = part_path(identity, key, rank)
    assert parse_path(str(part)) == part == part_path(identity[:8], key, rank)
    assert part.identity == identity[:8]
    assert not is_temporary(str(part).rpartition("/")[2])


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        PATH.upper(),
        "/" + PATH,
        PATH + "/",
        PATH + ".tmp",
        PATH + "\n",
        PATH.replace(".0.kv", ".00.kv"),
        PATH.replace(".0.kv", ".-1.kv"),
        PATH.replace(".0.kv", ".kv"),
        PATH.replace("/64/", "/65/"),
        PATH.replace("/64/", "/../"),
        PATH.replace("/64/", "//64/"),
        PATH.removeprefix("0001020304050607/"),
        PATH.removeprefix("00"),
        "x/" + PATH,
        f"0001020304050607/64/{KEY.hex()[:-2]}.0.kv",
    ],
)
def test_no_other_path_is_taken_for_a_part(path: str) -> None:
    assert parse_path(path) is None


@given(st.text(alphabet="0123456789abcdef./kv\n", max_size=100))
def test_what_parses_is_written_the_same_way(path: str) -> None:
    part = parse_path(path)
    assert part is None or str(part) == path


def test_temporary_names_differ_and_are_known_for_what_they_are() -> None:
    name = PATH.rpartition("/")[2]
    first, second = temporary_name(name), temporary_name(name)
    assert first != second
    assert is_temporary(first)
    assert is_temporary(temporary_name("probe"))
    assert parse_path(f"{PATH.rpartition('/')[0]}/{first}") is None
    assert not any(is_temporary(other) for other in ("notes.tmp", "a.12345678.tmp", name, first + "x"))
