"""The disk tier: never above its cap, never a wrong byte, and off while the disk does not work."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_store import disk_files, part_file
from cache_store.chunk import ChunkError, Header, encode_head
from cache_store.disk import DiskTier
from cache_store.disk_root import MARKER, DiskRefused
from cache_store.tier_health import NoRoom, PartMissing, TierUnavailable
from tests.chunk_parts import IDENTITY, Part, make_part, part_key

ROOT = Path(__file__).parents[2]
CAP = 100_000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(folder: Path, clock: Clock) -> Iterator[DiskTier]:
    tier = opened(folder, clock=clock)
    yield tier
    tier.check_integrity()
    tier.close()


def opened(folder: Path, capacity: int = CAP, clock: Clock | None = None) -> DiskTier:
    tier = DiskTier(str(folder), capacity, lock_wait_s=0, limit_s=2.0, probe_s=5.0, clock=clock or Clock())
    tier.scan()
    return tier


def put(tier: DiskTier, *parts: Part) -> None:
    for part in parts:
        tier.write(part.header, part.view)


def get(tier: DiskTier, part: Part, *, verify: bool = True) -> bytes:
    target = bytearray(part.header.nbytes)
    header = tier.read_into(
        part.header.key,
        part.header.identity,
        part.header.rank,
        memoryview(target),
        world_size=part.header.world_size,
        verify=verify,
    )
    assert header == part.header
    return bytes(target)


def drop(tier: DiskTier, part: Part) -> None:
    tier.delete(part.header.key, part.header.identity, part.header.rank)


def file_bytes(part: Part) -> int:
    return len(encode_head(part.header)) + len(part.payload)


def bytes_in(folder: Path) -> int:
    """Of all files, half-written ones included; the marker is no part."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != MARKER)


def temporary_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


def test_a_part_reads_back_byte_for_byte(tier: DiskTier, folder: Path) -> None:
    part = make_part(1)
    assert tier.write(part.header, part.view) == file_bytes(part) == tier.used == bytes_in(folder)
    assert get(tier, part) == part.payload
    assert (folder / part.path).is_file()


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 5_000, 3 << 20])
def test_parts_of_any_size_read_back(folder: Path, nbytes: int) -> None:
    tier = opened(folder, capacity=8 << 20)
    part = make_part(1, nbytes)
    put(tier, part)
    assert get(tier, part) == part.payload


def test_a_header_longer_than_the_first_read_is_read_whole(tier: DiskTier) -> None:
    part = make_part(1)
    part = part._replace(
        header=Header(
            **{name: getattr(part.header, name) for name in part.header.__struct_fields__}
            | {"tenant": "t" * 20_000}
        )
    )
    put(tier, part)
    assert get(tier, part) == part.payload


def test_a_longer_target_keeps_what_is_behind_the_payload(tier: DiskTier) -> None:
    part = make_part(1)
    put(tier, part)
    target = bytearray(b"x" * 1500)
    tier.read_into(part.header.key, IDENTITY, 0, memoryview(target), world_size=1)
    assert target == part.payload + b"x" * 500


def test_a_target_that_is_too_short_is_refused_and_the_part_stays(tier: DiskTier) -> None:
    part = make_part(1)
    put(tier, part)
    with pytest.raises(ValueError, match="1000 bytes for a target of 999"):
        tier.read_into(part.header.key, IDENTITY, 0, memoryview(bytearray(999)), world_size=1)
    assert get(tier, part) == part.payload


def test_parts_of_ranks_and_identities_lie_apart(tier: DiskTier) -> None:
    parts = [
        make_part(1, rank=rank, world_size=2, identity=identity)
        for rank in (0, 1)
        for identity in (IDENTITY, bytes(32))
    ]
    put(tier, *parts)
    assert [get(tier, part) for part in parts] == [part.payload for part in parts]


def test_what_is_not_known_of_a_part_is_not_compared_and_all_else_is(tier: DiskTier) -> None:
    part, target = make_part(1, rank=1, world_size=2), memoryview(bytearray(1000))
    put(tier, part)
    assert tier.read_into(part.header.key, IDENTITY[:8], 1, target, world_size=0) == part.header
    assert target == part.payload
    with pytest.raises(ChunkError, match="another world_size: 2; asked for: 4"):
        tier.read_into(part.header.key, IDENTITY[:8], 1, target, world_size=4)


def test_what_was_not_written_is_missing(tier: DiskTier) -> None:
    put(tier, make_part(1))
    for absent in (make_part(2), make_part(1, rank=1, world_size=2), make_part(1, identity=bytes(32))):
        with pytest.raises(PartMissing):
            get(tier, absent)
    assert tier.readable


def test_a_deleted_part_is_missing_and_its_bytes_are_free(tier: DiskTier, folder: Path) -> None:
    part = make_part(1)
    put(tier, part)
    drop(tier, part)
    assert tier.used == bytes_in(folder) == 0
    with pytest.raises(PartMissing):
        get(tier, part)
    drop(tier, part)


def test_a_part_written_again_is_replaced(tier: DiskTier) -> None:
    put(tier, make_part(1, 3000), make_part(1, 500, version=1))
    assert get(tier, make_part(1, 500, version=1)) == make_part(1, 500, version=1).payload
    assert tier.used == file_bytes(make_part(1, 500))


def test_a_payload_that_is_not_its_headers_is_refused(tier: DiskTier) -> None:
    part = make_part(1)
    with pytest.raises(ChunkError, match="999 bytes"):
        tier.write(part.header, part.view[:-1])
    assert tier.used == 0


def test_a_restart_serves_what_was_written_oldest_first(tier: DiskTier, folder: Path) -> None:
    parts = [make_part(number, created=2000.0 - number) for number in range(5)]
    put(tier, *parts)
    tier.close()
    again = DiskTier(str(folder), CAP)
    found = again.scan()
    assert [stored.key for stored in found] == [part.header.key for part in reversed(parts)]
    assert again.used == tier.used == sum(stored.file_bytes for stored in found)
    first, header = found[-1], parts[0].header
    assert (first.identity, first.rank, first.world_size) == (IDENTITY, 0, 1)
    assert (first.nbytes, first.created, first.cost_s, first.tenant) == (1000, 2000.0, 0.5, "a")
    assert all(get(again, part) == part.payload for part in parts)
    assert header.key == first.key
    again.check_integrity()


# The cap


def test_what_would_go_above_the_cap_is_refused(folder: Path) -> None:
    part, next_part = make_part(1), make_part(2)
    tier = opened(folder, capacity=2 * file_bytes(part) - 1)
    put(tier, part)
    with pytest.raises(NoRoom, match=f"above the cap of {tier.capacity}"):
        put(tier, next_part)
    assert bytes_in(folder) == tier.used == file_bytes(part)
    drop(tier, part)
    put(tier, next_part)
    assert tier.writable


def test_a_replacement_needs_room_for_both(folder: Path) -> None:
    part = make_part(1)
    tier = opened(folder, capacity=file_bytes(part) + 500)
    put(tier, part)
    with pytest.raises(NoRoom):
        put(tier, part)
    assert get(tier, part) == part.payload


def test_a_smaller_cap_removes_the_oldest_at_the_next_start(folder: Path) -> None:
    tier = opened(folder)
    parts = [make_part(number) for number in range(6)]
    put(tier, *parts)
    tier.close()
    smaller = DiskTier(str(folder), 3 * file_bytes(parts[0]) + 5)
    assert [stored.key for stored in smaller.scan()] == [part.header.key for part in parts[3:]]
    assert smaller.removed == {"over_cap": 3}
    assert bytes_in(folder) == smaller.used <= smaller.capacity
    smaller.check_integrity()


def test_threads_that_write_at_once_fill_the_cap_and_no_more(folder: Path) -> None:
    parts = [make_part(number, 2000) for number in range(40)]
    size = file_bytes(parts[0])
    tier = opened(folder, capacity=10 * size + size // 2)
    begin, outcomes = threading.Barrier(8), []

    def write(mine: list[Part]) -> None:
        begin.wait(10)
        for part in mine:
            try:
                outcomes.append(tier.write(part.header, part.view))
            except NoRoom:
                outcomes.append(0)

    run_threads([lambda mine=parts[number::8]: write(mine) for number in range(8)])
    assert sorted(outcomes)[-10:] == [size] * 10
    assert sum(outcomes) == tier.used == bytes_in(folder) == 10 * size
    tier.check_integrity()


def run_threads(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_write_read_and_delete_the_same_parts_leave_true_books(folder: Path, seed: int) -> None:
    parts = [
        make_part(number, 1000 + 500 * version, version=version)
        for number in range(4)
        for version in range(3)
    ]
    tier = opened(folder, capacity=12_000)

    def work(chance: random.Random) -> None:
        for _ in range(150):
            part = chance.choice(parts)
            what = chance.randrange(3)
            try:
                if what == 0:
                    put(tier, part)
                elif what == 1:
                    drop(tier, part)
                else:
                    target = bytearray(5000)
                    header = tier.read_into(part.header.key, IDENTITY, 0, memoryview(target), world_size=1)
                    assert header in [other.header for other in parts]
            except (NoRoom, PartMissing):
                pass

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(random.Random(f"{seed} {number}"))
        except BaseException as error:
            failures.append(error)

    run_threads([lambda number=number: guarded(number) for number in range(6)])
    assert failures == []
    assert tier.used == bytes_in(folder) <= tier.capacity
    assert temporary_in(folder) == []
    tier.check_integrity()


def test_bytes_stay_below_the_cap_through_kills_and_restarts(folder: Path) -> None:
    """Stopped at random moments: the sum over all files is exact then, half-written ones included."""
    capacity, chance = 4_000_000, random.Random(5)
    kills = stops = unfinished = 0
    while kills < 8 or (unfinished == 0 and kills < 40):
        command = [sys.executable, "-m", "tests.unit.disk_writer", str(folder), str(capacity), str(kills)]
        writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        try:
            for _ in range(4):
                for _ in range(chance.randrange(1, 12)):
                    assert writer.stdout.readline()
                writer.send_signal(signal.SIGSTOP)
                assert os.WIFSTOPPED(os.waitpid(writer.pid, os.WUNTRACED)[1])
                assert bytes_in(folder) <= capacity
                stops += 1
                writer.send_signal(signal.SIGCONT)
        finally:
            writer.kill()
            writer.wait()
            writer.stdout.close()
        kills += 1
        assert bytes_in(folder) <= capacity

        tier = DiskTier(str(folder), capacity)
        found = tier.scan()
        assert temporary_in(folder) == []
        assert found
        for stored in found:
            target = memoryview(bytearray(stored.nbytes))
            tier.read_into(stored.key, stored.identity, stored.rank, target, world_size=stored.world_size)
        assert set(tier.removed) <= {"temporary"}
        unfinished += tier.removed["temporary"]
        assert tier.used == bytes_in(folder) <= capacity
        tier.check_integrity()
        tier.close()
    assert stops == 4 * kills
    assert unfinished


# Files that are not what they should be


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the magic": lambda path: flip(path, 0),
    "the version": lambda path: flip(path, 7),
    "a bit of the header": lambda path: flip(path, 60),
    "the first bit of the payload": lambda path: flip(path, -1000),
    "the last bit of the payload": lambda path: flip(path, -1),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the header": lambda path: os.truncate(path, 40),
    "empty": lambda path: os.truncate(path, 0),
    "one byte long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "something else": lambda path: path.write_bytes(os.urandom(5000)),
    "another part": lambda path: path.write_bytes(encode_head(make_part(2).header) + make_part(2).payload),
    "another identity": lambda path: path.write_bytes(
        encode_head(make_part(1, identity=IDENTITY[:8] + bytes(24)).header) + make_part(1).payload
    ),
    "another rank": lambda path: path.write_bytes(
        encode_head(make_part(1, rank=1, world_size=2).header) + make_part(1).payload
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_never_handed_out_and_removed(tier: DiskTier, folder: Path, damage: str) -> None:
    part = make_part(1)
    put(tier, part, make_part(3))
    DAMAGE[damage](folder / part.path)
    with pytest.raises(ChunkError) as raised:
        get(tier, part)
    assert tier.removed == {raised.value.fault: 1}
    assert not (folder / part.path).exists()
    with pytest.raises(PartMissing):
        get(tier, part)
    assert tier.readable
    put(tier, part)
    assert get(tier, part) == part.payload


@pytest.mark.parametrize(
    "damage",
    sorted(
        DAMAGE.keys() - {"the first bit of the payload", "the last bit of the payload", "another identity"}
    ),
)
def test_a_start_removes_damaged_files(tier: DiskTier, folder: Path, damage: str) -> None:
    put(tier, make_part(1), make_part(3))
    DAMAGE[damage](folder / make_part(1).path)
    tier.close()
    found = tier.scan()
    assert [stored.key for stored in found] == [part_key(3)]
    assert tier.removed.total() == 1
    assert tier.used == bytes_in(folder) == file_bytes(make_part(3))


def test_without_verify_all_but_the_payloads_checksum_is_checked(tier: DiskTier, folder: Path) -> None:
    part = make_part(1)
    put(tier, part)
    flip(folder / part.path, -1)
    assert get(tier, part, verify=False) != part.payload
    flip(folder / part.path, 60)
    with pytest.raises(ChunkError):
        get(tier, part, verify=False)


def test_a_start_removes_temporary_and_foreign_files_where_parts_are(tier: DiskTier, folder: Path) -> None:
    part = make_part(1)
    put(tier, part)
    shard = (folder / part.path).parent
    (shard / f"{part.header.key.hex()}.0.kv.0123abcd.tmp").write_bytes(b"half")
    (folder / "probe.0123abcd.tmp").write_bytes(b"half")
    (shard / "notes.txt").write_bytes(b"of somebody")
    (shard / f"{part.header.key.hex()}.1.kv").symlink_to("/etc/hostname")
    os.mkfifo(shard / f"{part.header.key.hex()}.2.kv")
    tier.close()
    assert [stored.key for stored in tier.scan()] == [part.header.key]
    assert tier.removed == {"temporary": 2, "foreign": 3}
    assert [path.name for path in shard.iterdir()] == [f"{part.header.key.hex()}.0.kv"]
    assert Path("/etc/hostname").exists()


def test_what_is_elsewhere_under_the_root_is_counted_and_not_touched(tier: DiskTier, folder: Path) -> None:
    part = make_part(1)
    put(tier, part)
    others = [
        folder / "readme",
        folder / "0123" / "x.kv",
        folder / part.path[:16] / "list",
        folder / part.path[:19] / "more" / "x",
    ]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"x")
    tier.close()
    tier.scan()
    assert all(other.exists() for other in others)
    assert tier.left == 4
    assert tier.removed == {}


def test_a_bad_file_is_not_removed_once_another_has_taken_its_name(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.write_bytes(b"bad")
    inode = bad.stat().st_ino
    good.write_bytes(b"good")
    good.rename(bad)
    assert part_file.remove_file(str(bad), inode) is None
    assert bad.read_bytes() == b"good"
    assert part_file.remove_file(str(bad), bad.stat().st_ino) == 4
    assert not bad.exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_file_is_not_read(tier: DiskTier, folder: Path, kind: str) -> None:
    part = make_part(1)
    put(tier, make_part(2), part)
    path = folder / part.path
    path.rename(folder.parent / "moved")
    makers: dict[str, Callable[[], object]] = {
        "link": lambda: path.symlink_to(folder.parent / "moved"),
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    makers[kind]()
    with pytest.raises(ChunkError, match="no regular file"):
        get(tier, part)
    assert (folder.parent / "moved").exists()
    if kind == "folder":
        path.rmdir()


@pytest.mark.parametrize("noticed", ["read", "delete"])
def test_a_file_that_others_removed_is_missing_and_its_bytes_come_back(folder: Path, noticed: str) -> None:
    parts = [make_part(number) for number in range(3)]
    tier = opened(folder, capacity=3 * file_bytes(parts[0]))
    put(tier, *parts)
    for part in parts[:2]:
        (folder / part.path).unlink()
    if noticed == "read":
        with pytest.raises(PartMissing):
            get(tier, parts[0])
    else:
        drop(tier, parts[0])
    put(tier, make_part(4), make_part(5))
    assert tier.used == bytes_in(folder) == 3 * file_bytes(parts[0])
    tier.check_integrity()


# Whose folder it is


def test_a_folder_with_files_of_others_is_refused_and_stays_as_it_is(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(DiskRefused, match=r"files that are not Manta's \(thesis.tex\).* a folder of its own"):
        opened(folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_or_a_fresh_disk_is_taken(folder: Path) -> None:
    (folder / "lost+found").mkdir(parents=True)
    tier = opened(folder)
    put(tier, make_part(1))
    assert (folder / MARKER).exists()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskRefused, match="needed as a folder"):
            opened(path)


def test_only_our_user_may_read_the_folder(tier: DiskTier, folder: Path) -> None:
    put(tier, make_part(1))
    modes = {path.stat().st_mode & 0o077 for path in (folder, *folder.rglob("*"))}
    assert modes == {0}


def test_a_second_process_is_refused_until_the_first_is_gone(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.disk_writer", str(folder), "4000000", "1"]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline()
        with pytest.raises(DiskRefused, match=f"in use by another process.*process {writer.pid}"):
            opened(folder)
        assert writer.stdout.readline()
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    opened(folder, capacity=4_000_000).close()


def test_before_the_scan_and_after_the_end_all_is_refused(folder: Path) -> None:
    tier, part = DiskTier(str(folder), CAP), make_part(1)
    assert not folder.exists()
    for _ in range(2):
        with pytest.raises(TierUnavailable):
            put(tier, part)
        with pytest.raises(TierUnavailable):
            get(tier, part)
        assert (tier.readable, tier.writable, tier.probe()) == (False, False, False)
        tier.scan()
        assert (tier.readable, tier.writable, tier.probe()) == (True, True, True)
        tier.close()


# Bad days


class Disk:
    """Stands where files are created: fails as a disk does, with half of the bytes written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.error: int | None = None
        self.takes_s = 0.0
        self._clock = clock
        monkeypatch.setattr(disk_files, "create_file", self)

    def __call__(self, path: str, pieces: list[memoryview], *, sync: bool) -> None:
        self._clock.now += self.takes_s
        if self.error is not None:
            part_file.create_file(path, [piece[: len(piece) // 2] for piece in pieces], sync=sync)
            raise OSError(self.error, os.strerror(self.error))
        part_file.create_file(path, pieces, sync=sync)


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Disk:
    return Disk(monkeypatch, clock)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_read_only_disk_is_off_for_writes_and_still_read(
    tier: DiskTier, folder: Path, hardware: Disk, code: int, tier_log: list[str]
) -> None:
    kept = make_part(1)
    put(tier, kept)
    before = tier.used
    hardware.error = code
    for number in range(2, 20):
        with pytest.raises(TierUnavailable):
            put(tier, make_part(number))
    assert (tier.readable, tier.writable) == (True, False)
    assert get(tier, kept) == kept.payload
    assert (tier.writing.switched_off, tier.writing.failed, tier.used) == (1, 1, before)
    assert bytes_in(folder) == before
    assert len(tier_log) == 1
    assert os.strerror(code) in tier_log[0]


def test_it_comes_back_by_itself_once_the_disk_works(
    tier: DiskTier, folder: Path, hardware: Disk, clock: Clock
) -> None:
    put(tier, make_part(1))
    hardware.error = errno.ENOSPC
    with pytest.raises(TierUnavailable):
        put(tier, make_part(2))
    clock.now += 6
    assert not tier.probe()
    hardware.error = None
    assert not tier.probe()
    clock.now += 6
    assert tier.probe()
    put(tier, make_part(2))
    assert tier.used == bytes_in(folder)
    assert temporary_in(folder) == []


def test_deleting_goes_on_while_writes_are_off(tier: DiskTier, folder: Path, hardware: Disk) -> None:
    put(tier, make_part(1))
    hardware.error = errno.ENOSPC
    with pytest.raises(TierUnavailable):
        put(tier, make_part(2))
    drop(tier, make_part(1))
    assert tier.used == bytes_in(folder) == 0
    assert not tier.writable


def test_a_slow_disk_switches_off_and_comes_back(tier: DiskTier, hardware: Disk, clock: Clock) -> None:
    hardware.takes_s = 2.5
    put(tier, make_part(1), make_part(2), make_part(3))
    assert (tier.writable, tier.writing.slow) == (False, 3)
    with pytest.raises(TierUnavailable, match="operations take"):
        put(tier, make_part(4))
    hardware.takes_s = 0
    clock.now += 6
    assert tier.probe()
    put(tier, make_part(4))


def test_what_cant_be_removed_counts_until_it_can(
    tier: DiskTier, folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    put(tier, make_part(1), make_part(2))
    with monkeypatch.context() as patch:
        patch.setattr(
            disk_files, "remove_file", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only"))
        )
        drop(tier, make_part(1))
        assert not tier.writable
        assert tier.used == bytes_in(folder) == 2 * file_bytes(make_part(1))
    clock.now += 6
    assert tier.probe()
    assert tier.used == bytes_in(folder) == file_bytes(make_part(1))


def test_a_removed_folder_is_made_and_locked_again(tier: DiskTier, folder: Path, clock: Clock) -> None:
    put(tier, make_part(1))
    shutil.rmtree(folder)
    with pytest.raises(TierUnavailable, match="removed or replaced"):
        put(tier, make_part(2))
    with pytest.raises(PartMissing):
        get(tier, make_part(1))
    clock.now += 6
    assert tier.probe()
    put(tier, make_part(2))
    assert get(tier, make_part(2)) == make_part(2).payload
    assert tier.used == bytes_in(folder) == file_bytes(make_part(2))
    with pytest.raises(DiskRefused, match="in use"):
        opened(folder)


def test_a_folder_that_was_replaced_by_one_of_others_is_left_alone(
    tier: DiskTier, folder: Path, clock: Clock
) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    for _ in range(3):
        with pytest.raises(TierUnavailable):
            put(tier, make_part(1))
        clock.now += 100
        assert not tier.probe()
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


REAL_DISK = """
import sys, errno, subprocess
from cache_store.disk import DiskTier
from cache_store.tier_health import TierUnavailable
from tests.chunk_parts import make_part

now = [100.0]
tier = DiskTier(sys.argv[1] + "/kv", 50 << 20, probe_s=5.0, clock=lambda: now[0])
tier.scan()

def write(number):
    part = make_part(number, 300_000)
    try:
        tier.write(part.header, part.view)
    except TierUnavailable as error:
        return str(error)

def read(number):
    part, target = make_part(number, 300_000), bytearray(300_000)
    tier.read_into(part.header.key, part.header.identity, 0, memoryview(target), world_size=1)
    assert target == part.payload

said = [write(number) for number in range(8)]
assert said[0] is None and "No space left" in said[-1], said
assert tier.readable and not tier.writable
read(0)
for number in range(8):
    part = make_part(number, 300_000)
    tier.delete(part.header.key, part.header.identity, 0)
now[0] += 6
assert tier.probe() and write(1) is None
tier.check_integrity()

subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
assert "Read-only" in write(2)
tier.delete(make_part(1).header.key, make_part(1).header.identity, 0)
read(1)
now[0] += 600
assert not tier.probe()
subprocess.run(["mount", "-o", "remount,rw", sys.argv[1]], check=True)
now[0] += 600
assert tier.probe() and write(2) is None
read(2)
tier.check_integrity()
print("done")
"""


def test_a_disk_that_really_is_full_and_read_only(tmp_path: Path) -> None:
    """On a small tmpfs of its own namespace, where this machine lets users mount one."""
    if subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("no mounts in user namespaces here")
    run = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", run, "sh", str(tmp_path), sys.executable, REAL_DISK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr


# Any order of all of it


class AnyOrder(RuleBasedStateMachine):
    """Writes, reads, deletes, damage, strangers and restarts: what is handed out is what was written last."""

    numbers = st.integers(0, 5)

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.folder = Path(tempfile.mkdtemp(prefix="manta-disk-")) / "kv"
        self.there: dict[int, Part] = {}
        self.damaged: set[int] = set()
        self.resized = False
        self.tier = opened(self.folder, capacity=9_000, clock=self.clock)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.folder.parent)

    @rule(number=numbers, nbytes=st.integers(0, 3000), version=st.integers(0, 2))
    def write(self, number: int, nbytes: int, version: int) -> None:
        part = make_part(number, nbytes, version=version)
        try:
            put(self.tier, part)
        except NoRoom:
            assert self.tier.used + file_bytes(part) > self.tier.capacity
            return
        self.there[number] = part
        self.damaged.discard(number)

    @rule(number=numbers)
    def read(self, number: int) -> None:
        part = self.there.get(number, make_part(number))
        if number not in self.there:
            with pytest.raises(PartMissing):
                get(self.tier, part)
        elif number in self.damaged:
            with pytest.raises(ChunkError):
                get(self.tier, part)
            self._forget(number)
        else:
            assert get(self.tier, part) == part.payload

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        drop(self.tier, make_part(number))
        self._forget(number)

    @precondition(lambda self: set(self.there) - self.damaged)
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.there) - self.damaged)))
        path = self.folder / self.there[number].path
        at = data.draw(st.integers(0, path.stat().st_size - 1))
        if how == "flip":
            flip(path, at)
        else:
            os.truncate(path, at)
            self.resized = True
        self.damaged.add(number)

    @rule(name=st.sampled_from(["notes", "x.tmp", "0.kv"]))
    def stranger(self, name: str) -> None:
        shard = self.folder / make_part(0).path[:19]
        shard.mkdir(parents=True, exist_ok=True)
        (shard / name).write_bytes(b"")
        self._restart()

    @rule()
    def restart(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self.tier.close()
        self.tier = DiskTier(str(self.folder), 9_000, lock_wait_s=0, clock=self.clock)
        found = {stored.key for stored in self.tier.scan()}
        for number in list(self.there):
            if part_key(number) not in found:
                assert number in self.damaged
                self._forget(number)
        assert found == {part_key(number) for number in self.there}
        self.resized = False

    def _forget(self, number: int) -> None:
        self.there.pop(number, None)
        self.damaged.discard(number)

    @invariant()
    def the_books_are_true(self) -> None:
        if hasattr(self, "tier"):
            self.clock.now += 100
            assert bytes_in(self.folder) <= self.tier.capacity
            assert temporary_in(self.folder) == []
            # What others have cut off is noticed when the file is read, or at the next start.
            if not self.resized:
                self.tier.check_integrity()


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_order_of_operations_keeps_bytes_and_books_right = AnyOrder.TestCase
