"""The remote tier, on a real S3 server and on a folder: whole parts or none, and no call without an end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache_store import remote
from cache_store.chunk import ChunkError, encode_head
from cache_store.chunk_path import Stored
from cache_store.remote import RemoteTier
from cache_store.remote_listing import STALE_S
from cache_store.remote_uri import open_remote
from cache_store.tier_health import PartMissing, TierUnavailable
from cache_store.timed_calls import TimedCalls
from tests.chunk_parts import IDENTITY, Part, make_part, part_key
from tests.s3_server import S3Server, s3_server

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> bool:
        self.now += seconds
        return False


class Place:
    """A remote tier and the folder in which its files can be seen."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.uri = uri
        self.folder = folder
        self.clock = Clock()
        self.tier = self.open()

    def open(self, limit_s: float = 20.0) -> RemoteTier:
        return RemoteTier(self.uri, limit_s=limit_s, probe_s=5.0, clock=self.clock)

    def file(self, part: Part) -> Path:
        return self.folder / part.path

    def replace(self, part: Part, data: bytes) -> None:
        """As another client of the store would: behind its back, a server takes the old length for true."""
        place = open_remote(self.uri)
        with place.files.open_output_stream(f"{place.root}/{part.path}", compression=None) as stream:
            stream.write(data)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    prefix = f"kv/{tmp_path.name}"
    return Place(server.uri(prefix), server.bucket / prefix)


@pytest.fixture(params=["s3", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        found: Place = request.getfixturevalue("s3")
        return found
    return Place(f"file://{tmp_path}/kv", tmp_path / "kv")


def put(tier: RemoteTier, *parts: Part) -> None:
    for part in parts:
        tier.write(part.header, part.view)


def get(tier: RemoteTier, part: Part, *, verify: bool = True) -> bytes:
    target = memoryview(bytearray(part.header.nbytes))
    header = tier.read_into(
        part.header.key,
        part.header.identity,
        part.header.rank,
        target,
        world_size=part.header.world_size,
        verify=verify,
    )
    assert header == part.header
    return bytes(target)


def drop(tier: RemoteTier, part: Part) -> None:
    tier.delete(part.header.key, part.header.identity, part.header.rank)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("nbytes", [0, 1000, 4 << 20, 12 << 20])
def test_a_part_reads_back_byte_for_byte(place: Place, nbytes: int) -> None:
    part = make_part(1, nbytes)
    assert place.tier.write(part.header, part.view) == len(encode_head(part.header)) + nbytes
    assert get(place.tier, part) == part.payload
    assert place.file(part).read_bytes() == encode_head(part.header) + part.payload
    assert files_below(place.folder) == {part.path}


def test_another_node_finds_and_reads_what_one_wrote(place: Place) -> None:
    parts = [make_part(number, 500) for number in range(5)] + [make_part(9, rank=1, world_size=2)]
    put(place.tier, *parts)
    node = place.open()
    found = node.scan()
    assert {(stored.key, stored.rank) for stored in found} == {
        (part.header.key, part.header.rank) for part in parts
    }
    assert all(get(node, part) == part.payload for part in parts)


def test_what_a_listing_says_is_enough_to_read_a_part(place: Place) -> None:
    part = make_part(1, rank=1, world_size=2)
    put(place.tier, part)
    (stored,) = place.tier.scan()
    target = memoryview(bytearray(stored.file_bytes))
    header = place.tier.read_into(
        stored.key, stored.identity, stored.rank, target, world_size=stored.world_size
    )
    assert header == part.header
    assert target[: header.nbytes] == part.payload


def test_a_listing_tells_what_paths_and_sizes_tell(place: Place) -> None:
    part = make_part(1)
    put(place.tier, part)
    (stored,) = place.tier.listing().parts
    size = len(encode_head(part.header)) + 1000
    assert stored == Stored(IDENTITY[:8], part.header.key, 0, 0, size, size, stored.created)
    assert abs(stored.created - time.time()) < 3600


def test_a_listing_ends_at_its_limits_and_says_so(place: Place) -> None:
    put(place.tier, *(make_part(number, 10) for number in range(6)))
    whole = place.tier.listing()
    assert (len(whole.parts), whole.complete) == (6, True)
    some = place.tier.listing(limit=4)
    assert (len(some.parts), some.complete) == (4, False)
    assert set(some.parts) < set(whole.parts)
    assert place.tier.listing(limit=6).complete
    assert place.tier.listing(limit_s=0) == ([], False, 0, [])


def test_a_scan_that_does_not_find_all_says_so_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not caplog: engines and Ray in the same test process set up logging for themselves.
    said: list[str] = []
    monkeypatch.setattr(remote.logger, "warning", lambda text, *values: said.append(text % values))
    put(place.tier, *(make_part(number, 10) for number in range(6)))
    listing = place.tier.listing
    for limit in (4, 4, 6):
        monkeypatch.setattr(place.tier, "listing", lambda limit=limit: listing(limit=limit))
        assert len(place.tier.scan()) == limit
    assert said == [f"{place.tier.shown} has more parts than one listing finds: 4 are known here"]


def test_a_listing_can_be_of_one_identity(place: Place) -> None:
    put(place.tier, make_part(1), make_part(2, identity=bytes(32)))
    assert [part.key for part in place.tier.listing(identity=bytes(32)).parts] == [part_key(2)]
    assert place.tier.listing(identity=b"\1" * 32) == ([], True, 0, [])


def test_an_empty_place_has_nothing(place: Place) -> None:
    assert place.tier.listing() == ([], True, 0, [])
    with pytest.raises(PartMissing):
        get(place.tier, make_part(1))
    drop(place.tier, make_part(1))
    assert (place.tier.readable, place.tier.writable) == (True, True)


def test_a_deleted_part_is_gone(place: Place) -> None:
    put(place.tier, make_part(1), make_part(2))
    drop(place.tier, make_part(1))
    assert files_below(place.folder) == {make_part(2).path}
    with pytest.raises(PartMissing):
        get(place.tier, make_part(1))
    assert place.tier.writing.failed == 0


def test_a_part_written_again_is_replaced(place: Place) -> None:
    put(place.tier, make_part(1, 3000), make_part(1, 500, version=1))
    assert get(place.tier, make_part(1, 500, version=1)) == make_part(1, 500, version=1).payload


def test_writers_of_one_part_at_once_leave_one_of_their_parts(place: Place) -> None:
    parts = [make_part(1, 100_000, version=version) for version in range(4)]
    threads = [threading.Thread(target=put, args=(place.tier, *[part] * 5)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    target = memoryview(bytearray(100_000))
    header = place.tier.read_into(part_key(1), IDENTITY, 0, target, world_size=1)
    assert header in [part.header for part in parts]
    assert files_below(place.folder) == {parts[0].path}


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the header": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "a bit of the payload": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "short": lambda data: data[:-1],
    "cut in the header": lambda data: data[:30],
    "empty": lambda _: b"",
    "long": lambda data: data + b"x",
    "very long": lambda data: data + bytes(200_000),
    "something else": lambda _: os.urandom(3000),
    "another part": lambda _: encode_head(make_part(2).header) + make_part(2).payload,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_never_handed_out_and_removed(place: Place, damage: str) -> None:
    part = make_part(1)
    put(place.tier, part)
    file = place.file(part)
    place.replace(part, DAMAGE[damage](file.read_bytes()))
    with pytest.raises(ChunkError) as raised:
        get(place.tier, part)
    assert place.tier.removed == {raised.value.fault: 1}
    assert not file.exists()
    assert place.tier.readable


def test_without_verify_all_but_the_payloads_checksum_is_checked(place: Place) -> None:
    part = make_part(1)
    put(place.tier, part)
    file = place.file(part)
    file.write_bytes(DAMAGE["a bit of the payload"](file.read_bytes()))
    assert get(place.tier, part, verify=False) != part.payload
    place.replace(part, DAMAGE["short"](file.read_bytes()))
    with pytest.raises(ChunkError):
        get(place.tier, part, verify=False)


def test_a_file_of_another_version_is_not_read_and_left_to_its_nodes(place: Place) -> None:
    part = make_part(1)
    put(place.tier, part)
    file = place.file(part)
    data = file.read_bytes()
    file.write_bytes(data[:7] + b"\x63" + data[8:])
    with pytest.raises(ChunkError, match="version 99"):
        get(place.tier, part)
    assert file.exists()


def test_a_target_that_is_too_short_is_refused_and_the_part_stays(place: Place) -> None:
    part = make_part(1)
    put(place.tier, part)
    with pytest.raises(ValueError, match="1000 bytes for a target of 999"):
        place.tier.read_into(part.header.key, IDENTITY, 0, memoryview(bytearray(999)), world_size=1)
    assert get(place.tier, part) == part.payload


def test_files_of_others_are_counted_and_not_touched(place: Place) -> None:
    part = make_part(1)
    put(place.tier, part)
    for other in (place.file(part).parent / "notes", place.folder / "readme", place.folder / "x" / "y"):
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"x")
    before = files_below(place.folder)
    listing = place.tier.listing()
    assert ([stored.key for stored in listing.parts], listing.foreign) == ([part.header.key], 1)
    place.tier.scan()
    assert files_below(place.folder) == before


def test_what_killed_writers_left_is_removed_once_nobody_can_be_writing_it(place: Place) -> None:
    part = make_part(1)
    put(place.tier, part)
    old, fresh = (Path(f"{place.file(part)}.0123456{number}.tmp") for number in (1, 2))
    for path in (old, fresh):
        path.write_bytes(b"half")
    long_ago = time.time() - STALE_S - 60
    os.utime(old, (long_ago, long_ago))
    assert [stored.key for stored in place.tier.scan()] == [part.header.key]
    assert (old.exists(), fresh.exists()) == (False, True)
    assert place.tier.removed == {"temporary": 1}


def test_a_writer_killed_at_any_moment_leaves_whole_parts_or_none(place: Place) -> None:
    program = (
        "import sys; from cache_store.remote import RemoteTier; from tests.chunk_parts import make_part\n"
        "tier = RemoteTier(sys.argv[1]); parts = [make_part(number, 8 << 20) for number in range(8)]\n"
        "print('started', flush=True)\n"
        "while True:\n"
        "    for part in parts: tier.write(part.header, part.view); print('wrote', flush=True)\n"
    )
    for lines in (2, 4, 7):
        writer = subprocess.Popen(
            [sys.executable, "-c", program, place.uri], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        try:
            for _ in range(lines):
                assert writer.stdout.readline()
        finally:
            writer.kill()
            writer.wait()
            writer.stdout.close()
        found = place.open().scan()
        assert found
        for stored in found:
            part = next(part for part in map(big_part, range(8)) if part.header.key == stored.key)
            assert get(place.tier, part) == part.payload


def big_part(number: int) -> Part:
    return make_part(number, 8 << 20)


# Bad days


def test_check_passes_where_files_come_back_as_they_were_written(place: Place) -> None:
    place.tier.check()
    assert files_below(place.folder) == set()


def test_wrong_credentials_switch_it_off_and_say_what_to_look_at(
    s3: Place, monkeypatch: pytest.MonkeyPatch, tier_log: list[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    tier = s3.open()
    with pytest.raises(TierUnavailable, match=r"writes to s3://chunks/kv.*AWS_ACCESS_KEY_ID"):
        tier.check()
    for number in range(5):
        with pytest.raises(TierUnavailable):
            put(tier, make_part(number))
    assert not tier.writable
    assert len(tier_log) == 1
    assert "not-the-secret" not in tier_log[0]


def test_a_store_that_alters_what_it_gets_is_found_out(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    with pytest.raises(TierUnavailable, match=r"other bytes.*AWS_REQUEST_CHECKSUM_CALCULATION=when_required"):
        s3.open().check()


def test_a_missing_bucket_is_no_store(server: S3Server, s3: Place) -> None:
    tier = RemoteTier(server.uri().replace("s3://chunks/", "s3://nowhere/"), limit_s=20)
    with pytest.raises(TierUnavailable):
        tier.check()


def test_a_store_that_does_not_answer_is_off_in_time_and_comes_back(
    server: S3Server, s3: Place, tier_log: list[str]
) -> None:
    part = make_part(1)
    put(s3.tier, part)
    tier = s3.open(limit_s=0.3)
    began = time.monotonic()
    server.pause()
    try:
        for _ in range(10):
            with pytest.raises(TierUnavailable):
                get(tier, part)
            with pytest.raises(TierUnavailable):
                put(tier, part)
        assert (tier.readable, tier.writable) == (False, False)
        # Three of each wait for their limit; the others are refused at once.
        assert time.monotonic() - began < 10
    finally:
        server.resume()
    assert len(tier_log) == 2
    assert in_time(lambda: tier.probe() or s3.clock.tick(100))
    assert get(tier, part) == part.payload


def test_a_late_answer_does_not_reach_the_target(server: S3Server, s3: Place) -> None:
    part = make_part(1)
    put(s3.tier, part)
    # With one call at a time, the next one that is answered shows that the late one has ended.
    tier = RemoteTier(s3.uri, limit_s=0.2, calls=1, clock=s3.clock)
    target = memoryview(bytearray(1000))
    server.pause()
    try:
        with pytest.raises(TierUnavailable, match=r"no answer within 0\.2 s"):
            tier.read_into(part.header.key, IDENTITY, 0, target, world_size=1)
    finally:
        server.resume()
    assert in_time(lambda: answers(tier, part))
    assert bytes(target) == bytes(1000)


def answers(tier: RemoteTier, part: Part) -> bool:
    try:
        return get(tier, part) == part.payload
    except TierUnavailable:
        return False


def in_time(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
    return False


def test_a_stuck_operation_does_not_keep_a_process_from_ending() -> None:
    program = (
        "import sys, threading; from cache_store.remote import RemoteTier; from tests.chunk_parts import make_part\n"
        "tier = RemoteTier(sys.argv[1], limit_s=0.2); part = make_part(1)\n"
        "try: tier.write(part.header, part.view)\n"
        "except Exception as error: print(type(error).__name__)\n"
        "tier.close()\n"
    )
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        uri = f"s3://a:b@bucket/p?endpoint_override=127.0.0.1:{silent.getsockname()[1]}&scheme=http&region=x"
        done = subprocess.run(
            [sys.executable, "-c", program, uri],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.stdout, done.returncode) == ("TierUnavailable\n", 0), done.stderr


def test_after_close_all_is_refused(place: Place) -> None:
    place.tier.close()
    for call in (
        lambda: put(place.tier, make_part(1)),
        lambda: get(place.tier, make_part(1)),
        place.tier.scan,
        place.tier.check,
    ):
        with pytest.raises(TierUnavailable, match="closed"):
            call()
    assert (place.tier.readable, place.tier.writable, place.tier.probe()) == (False, False, False)


def test_a_full_disk_under_a_folder_leaves_no_half_file(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from cache_store.remote import RemoteTier\n"
        "from cache_store.tier_health import TierUnavailable\n"
        "from tests.chunk_parts import make_part\n"
        "tier = RemoteTier('file://' + sys.argv[1] + '/kv'); said = []\n"
        "for number in range(8):\n"
        "    part = make_part(number, 300_000)\n"
        "    try: tier.write(part.header, part.view)\n"
        "    except TierUnavailable as error: said.append(str(error))\n"
        "assert len(said) == 5 and 'No space left' in said[0] and not tier.writable, said\n"
        "assert len(tier.scan()) == 3\n"
        "assert not list(pathlib.Path(sys.argv[1]).rglob('*.tmp'))\n"
        "print('done')\n"
    )
    if subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("no mounts in user namespaces here")
    run = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", run, "sh", str(tmp_path), sys.executable, program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr


# URIs


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("", "needed: s3://bucket/prefix"),
        ("/just/a/path", "needed: s3://bucket/prefix"),
        ("s3://", "needed: s3://bucket/prefix"),
        ("ftp://host/x", "ftp://host/x is no place for chunks"),
        (
            "s3://bucket/x?endpont_override=http://127.0.0.1",
            "unknown option endpont_override; known: .*endpoint_override",
        ),
        ("gs://bucket/x?endpont_override=127.0.0.1", "is no place for chunks: .*endpont_override"),
        ("file://host/x", "is no place for chunks"),
    ],
)
def test_a_uri_that_cant_be_used_is_refused_with_what_is_needed(uri: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RemoteTier(uri)


def test_secrets_of_a_uri_are_not_shown() -> None:
    tier = RemoteTier("s3://key:sec%2Fret@bucket/x/?scheme=http&endpoint_override=127.0.0.1:1&region=x")
    assert tier.shown == "s3://bucket/x/"
    assert "sec" not in tier.reading.name + tier.writing.name


def test_credentials_may_stand_in_the_uri(
    server: S3Server, s3: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = server.environment["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    RemoteTier(s3.uri.replace("s3://", f"s3://manta:{secret}@"), limit_s=20).check()


def test_missing_credentials_for_google_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    tier = RemoteTier("gs://bucket/prefix?endpoint_override=127.0.0.1:1&scheme=http", limit_s=30)
    with pytest.raises(
        TierUnavailable, match=r"gs://bucket/prefix.*none\.json.*GOOGLE_APPLICATION_CREDENTIALS"
    ):
        tier.check()


# Calls with a time limit


def test_a_timed_call_gives_back_what_the_call_does() -> None:
    calls = TimedCalls("x", 2)
    assert calls.run(lambda: 5, 10) == 5
    with pytest.raises(KeyError):
        calls.run(lambda: {}["x"], 10)
    with pytest.raises(TimeoutError, match="the call's own"):
        calls.run(lambda: (_ for _ in ()).throw(TimeoutError("the call's own")), 10)


def test_calls_that_were_left_behind_still_count() -> None:
    calls, end = TimedCalls("store", 2), threading.Event()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"no answer within 0.05 s"):
            calls.run(end.wait, 0.05)
    with pytest.raises(TimeoutError, match="all calls are busy"):
        calls.run(lambda: 5, 0.05)
    end.set()
    assert calls.run(lambda: 5, 10) == 5
