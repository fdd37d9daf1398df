"""What `manta check` says of the cache section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.check_cache import Found, cache_findings
from cluster.config import ClusterConfig

GIB = 1 << 30


def findings(cache: dict[str, Any], *, kind: str = "vllm", free: int = 100 * GIB) -> list[Found]:
    config = ClusterConfig.parse(
        {
            "model": {"path": "org/model"},
            "engine": {"kind": kind},
            "cache": {"share": "on"} | cache,
            "ray": {"object_store_mib": 1000},
        }
    )
    return list(cache_findings(config, 8 * GIB, lambda path: free))


def test_nothing_is_said_where_nothing_is_shared() -> None:
    assert findings({"share": "off", "dram": {"mib": 10_000}}) == []


def test_memory_that_fits_is_named() -> None:
    assert findings({"dram": {"mib": 800}}) == [
        ("ok", "cache memory", "800 MiB of Ray's object store of 1000 MiB")
    ]


def test_memory_beyond_the_object_store_is_an_error_with_both_numbers() -> None:
    ((level, subject, message),) = findings({"dram": {"mib": 1200}})
    assert (level, subject) == ("error", "cache memory")
    assert "1200" in message
    assert "1000" in message


def test_a_disk_without_room_is_a_warning(tmp_path: Path) -> None:
    _, (level, _, message) = findings({"disk": {"path": str(tmp_path), "mib": 2048}}, free=GIB)
    assert level == "warning"
    assert "2048" in message
    assert "1024 MiB free" in message


def test_a_folder_that_will_be_made_is_fine(tmp_path: Path) -> None:
    _, (level, _, message) = findings({"disk": {"path": str(tmp_path / "a" / "b"), "mib": 64}})
    assert (level, message) == ("ok", f"64 MiB at {tmp_path / 'a' / 'b'}")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    _, (level, _, message) = findings({"disk": {"path": str(tmp_path / "file")}})
    assert (level, message) == ("error", f"{tmp_path / 'file'} is no folder")


@pytest.mark.parametrize("uri", ["carrier-pigeon://x", "s3://"])
def test_a_uri_that_cant_be_used_is_an_error(uri: str) -> None:
    *_, (level, subject, _) = findings({"remote": {"uri": uri}})
    assert (level, subject) == ("error", "cache remote")


def test_simulated_engines_share_nothing() -> None:
    ((level, _, message),) = findings({}, kind="sim")
    assert level == "warning"
    assert "simulated" in message
