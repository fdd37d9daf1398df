"""A Unix socket that only its user can open."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from cache_store.private_socket import PrivateSocket, SocketInUse, UnsafeFolder, peer_uid

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_folder_and_socket_are_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "user" / "app" / "cache.sock"
    listener = PrivateSocket(path)
    assert [mode(path.parent.parent), mode(path.parent), mode(path)] == [0o700, 0o700, 0o600]
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
        accepted, _ = listener.socket.accept()
        assert peer_uid(accepted) == os.geteuid()
        accepted.close()
    listener.close()


def test_a_living_server_keeps_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "app" / "cache.sock"
    living = PrivateSocket(path)
    with pytest.raises(SocketInUse, match=str(path)):
        PrivateSocket(path)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
    living.close()


def test_the_socket_file_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "app" / "cache.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = PrivateSocket(path)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
    listener.close()


def test_closing_leaves_nothing_and_can_be_done_twice(tmp_path: Path) -> None:
    path = tmp_path / "app" / "cache.sock"
    listener = PrivateSocket(path)
    listener.close()
    assert not path.exists()
    again = PrivateSocket(path)
    listener.close()
    assert path.exists()
    again.close()


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "app" / "cache.sock"
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="no socket"):
        PrivateSocket(path)
    assert path.read_text() == "precious"


def test_a_path_that_is_too_long_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    with pytest.raises(ValueError, match=rf"{len(str(path))} bytes.* 107"):
        PrivateSocket(path)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir(mode=0o700)
    (tmp_path / "app").chmod(0o710)
    with pytest.raises(UnsafeFolder, match=r"mode 710.*mode 700"):
        PrivateSocket(tmp_path / "app" / "cache.sock")


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "app").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafeFolder, match="following links"):
        PrivateSocket(tmp_path / "app" / "cache.sock")


def test_a_folder_in_which_others_can_rename_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UnsafeFolder, match="written by others"):
        PrivateSocket(shared / "app" / "cache.sock")
    shared.chmod(0o1777)
    PrivateSocket(shared / "app" / "cache.sock").close()


def test_a_link_to_a_folder_in_which_others_can_rename_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "user").mkdir(parents=True)
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to(shared / "user")
    with pytest.raises(UnsafeFolder, match="written by others"):
        PrivateSocket(tmp_path / "link" / "app" / "cache.sock")


@as_root
@pytest.mark.parametrize("what", ["folder", "parent", "link"])
def test_what_belongs_to_another_user_is_refused(what: str, tmp_path: Path) -> None:
    parent = tmp_path / "user"
    (parent / "app").mkdir(parents=True, mode=0o700)
    (tmp_path / "link").symlink_to(parent)
    given = {"folder": parent / "app", "parent": parent, "link": tmp_path / "link"}[what]
    os.lchown(given, 65534, 65534)
    through = tmp_path / "link" if what == "link" else parent
    with pytest.raises(UnsafeFolder, match="user 65534"):
        PrivateSocket(through / "app" / "cache.sock")
