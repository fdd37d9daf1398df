"""What a lab promises: separate hosts that can be cut, slowed and killed, and nothing of them left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import lab as lab_module
from tests.hosts.host import Host, HostError, HostTimeout, kill_tree
from tests.hosts.lab import PREFIX, REPOSITORY, Lab, clear_leftovers, why_not

Hosts = Callable[..., list[Host]]

CONNECT = """python - <<'PROGRAM'
import socket, time
begun = time.monotonic()
socket.create_connection(('{to}', 22), 20).close()
print(time.monotonic() - begun)
PROGRAM"""
"""Prints the seconds of a TCP handshake: one round trip."""

DATAGRAMS = """python - <<'PROGRAM'
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for _ in range({count}):
        sender.sendto(b'x', ('{to}', 9))
# The link keeps the order: when this is through, every datagram has arrived or is lost.
for _ in range(50):
    try:
        socket.create_connection(('{to}', 22), 2).close()
        break
    except TimeoutError:
        pass
else:
    raise SystemExit('no way through')
PROGRAM"""

LIVING_LAB = """
import signal
from tests.hosts.lab import Lab
with Lab() as lab:
    host, = lab.make(["a"])
    host.popen("sleep 600")
    host.slow(delay_ms=1)
    print(lab.folder, host.pid1, lab._janitor.pid, host.network.inode, lab.switch.inode, flush=True)
    signal.pause()
"""


def wait_until(what: str, probe: Callable[[], object], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not probe():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def reaches(host: Host, to: Host) -> bool:
    return host.run(f"timeout 1 bash -c '</dev/tcp/{to.address}/22'", check=False).returncode == 0


def inside(*networks: int) -> list[int]:
    """Processes of this machine in networks with these inodes."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.stat(entry / "ns/net").st_ino in networks:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def links() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def test_hosts_reach_each_other_by_ssh_name_and_address(hosts: Hosts) -> None:
    a, b = hosts("a", "b")
    assert a.ssh(b, "hostname").stdout == "b\n"
    assert b.run("ssh a hostname").stdout == "a\n"
    assert a.address in b.run("getent hosts a").stdout
    assert reaches(a, b)


def test_ssh_keys_are_the_labs_own(lab: Lab, hosts: Hosts) -> None:
    (a,) = hosts("a")
    public = a.run("cat ~/.ssh/id_ed25519.pub ~/.ssh/authorized_keys").stdout.splitlines()
    assert set(public) == {(lab.folder / "key.pub").read_text().strip()}


def test_processes_host_name_and_shared_memory_are_separate(hosts: Hosts) -> None:
    a, b = hosts("a", "b", shm_mib=48)
    a.run("echo mine > /dev/shm/file && echo mine > /tmp/ray/file && echo mine > ~/file")
    sleeper = a.popen("exec sleep 543")
    try:
        wait_until("it runs", lambda: "sleep 543" in a.run("ps -e -o args").stdout)
        assert "sleep 543" not in b.run("ps -e -o args").stdout
    finally:
        kill_tree(sleeper)
    assert a.run("ps -p 1 -o comm=").stdout == b.run("ps -p 1 -o comm=").stdout == "sshd\n"
    assert b.run("hostname; ls /dev/shm /tmp/ray ~").stdout == "b\n/dev/shm:\n\n/root:\n\n/tmp/ray:\n"
    size = b.run("df -B1 --output=size /dev/shm | tail -1").stdout
    assert int(size) == 48 << 20
    assert not Path("/dev/shm/file").exists()


@pytest.mark.skipif(
    "overlay" not in Path("/proc/filesystems").read_text(), reason="the kernel has no overlay file system"
)
def test_what_a_host_changes_in_the_system_stays_there(hosts: Hosts) -> None:
    a, b = hosts("a", "b")
    for folder in ("/etc", "/var/lib", "/opt", "/srv", "/mnt", "/usr/local"):
        file = f"{folder}/manta-lab-test"
        a.run(f"echo mine > {file}")
        assert not Path(file).exists()
        assert b.run(f"cat {file}", check=False).returncode != 0


def test_this_python_and_repository_are_there(hosts: Hosts) -> None:
    (a,) = hosts("a")
    assert a.run("python -c 'import sys; print(sys.prefix)'").stdout.strip() == sys.prefix
    assert (
        a.run("cd $ROOT && python -c 'import cluster.config'", env={"ROOT": str(REPOSITORY)}).returncode == 0
    )


@pytest.mark.parametrize("shell", ["", "bash --login -c", "bash --login -i -c"])
def test_every_way_in_has_the_same_path(hosts: Hosts, shell: str) -> None:
    a, b = hosts("a", "b")
    expected = a.run("which python").stdout
    assert a.ssh(b, f"{shell} 'which python'" if shell else "which python").stdout == expected


def test_chosen_paths_are_visible_where_they_are_and_others_are_not(tmp_path: Path) -> None:
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for folder in (shown, hidden):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    if reason := why_not():
        pytest.skip(reason)
    with Lab(visible=[shown], environment={"COLOUR": "dark blue"}) as lab:
        a, b = lab.make(["a", "b"])
        assert a.run(f"cat {shown}/file").stdout == "shown"
        assert a.run("echo $COLOUR").stdout == a.ssh(b, "echo $COLOUR").stdout == "dark blue\n"
        if hidden.is_relative_to("/tmp"):
            assert a.run(f"cat {hidden}/file", check=False).returncode != 0


def test_a_command_that_fails_or_takes_too_long_says_so(hosts: Hosts) -> None:
    (a,) = hosts("a")
    with pytest.raises(HostError, match=r"a: 'echo lost >&2; exit 3' ended with 3:\nlost"):
        a.run("echo lost >&2; exit 3")
    assert a.run("exit 3", check=False).returncode == 3
    with pytest.raises(HostTimeout):
        a.run("sleep 543", timeout_s=0.2)
    assert "sleep 543" not in a.run("ps -e -o args").stdout


def test_files_are_written_as_given(hosts: Hosts) -> None:
    (a,) = hosts("a")
    text = 'it\'s 100% "so"\n$HOME\n'
    a.write("folder/file", text)
    assert a.run("cat /root/folder/file").stdout == text


def test_a_cut_host_is_unreachable_until_it_is_healed(hosts: Hosts) -> None:
    a, b, c = hosts("a", "b", "c")
    b.cut()
    assert not reaches(a, b)
    assert not reaches(b, a)
    assert reaches(a, c)
    assert b.run("hostname").stdout == "b\n"
    b.heal()
    wait_until("b answers again", lambda: reaches(a, b))


def test_delay_is_added_each_way_and_healed(hosts: Hosts) -> None:
    a, b, c = hosts("a", "b", "c")

    def round_trip(host: Host, to: Host) -> float:
        return min(float(host.run(CONNECT.format(to=to.address)).stdout) for _ in range(3))

    b.slow(delay_ms=150)
    slow = round_trip(a, b)
    assert min(slow, round_trip(b, a)) >= 0.3
    assert round_trip(a, c) < slow
    b.slow(delay_ms=50)
    less_slow = round_trip(a, b)
    assert 0.1 <= less_slow < slow
    b.heal()
    assert round_trip(a, b) < less_slow


def test_loss_is_the_share_of_packets_lost_in_each_direction(hosts: Hosts) -> None:
    a, b = hosts("a", "b")

    def arrived(host: Host) -> int:
        """Datagrams that found nobody listening."""
        names, values = (line.split() for line in host.run("grep ^Udp: /proc/net/snmp").stdout.splitlines())
        return int(dict(zip(names, values, strict=True))["NoPorts"])

    b.slow(loss=0.2)
    for sender, receiver in ((a, b), (b, a)):
        before = arrived(receiver)
        sender.run(DATAGRAMS.format(to=receiver.address, count=500))
        assert 340 <= arrived(receiver) - before <= 460
    b.heal()
    before = arrived(b)
    a.run(DATAGRAMS.format(to=b.address, count=500))
    assert arrived(b) - before == 500


def test_bandwidth_bounds_each_way(hosts: Hosts) -> None:
    a, b = hosts("a", "b")

    def seconds(sender: Host, to: Host) -> float:
        begun = time.monotonic()
        sender.run(f"head -c 1000000 /dev/zero | ssh {to.address} 'cat > /dev/null'")
        return time.monotonic() - begun

    unbound = min(seconds(a, b) for _ in range(3))
    b.slow(mbit=8)
    # A megabyte at a megabyte a second, less what may be on its way at the end.
    assert min(seconds(a, b), seconds(b, a)) >= max(0.9, unbound)


def test_a_crash_ends_all_processes_and_the_host_boots_again_with_its_disk(hosts: Hosts) -> None:
    a, b = hosts("a", "b")
    a.ssh(b, "nohup setsid sleep 543 > /dev/null 2>&1 & echo mine > kept; echo mine > /dev/shm/gone")
    b.popen("sleep 544")
    wait_until(
        "both run", lambda: {"sleep 543", "sleep 544"} <= set(b.run("ps -e -o args").stdout.splitlines())
    )
    assert len(inside(b.network.inode)) > 3
    b.crash()
    assert inside(b.network.inode) == []
    assert not b.is_up
    with pytest.raises(HostError, match="b is down"):
        b.run("true")
    assert not reaches(a, b)
    b.start()
    assert a.ssh(b, "cat kept; ls /dev/shm").stdout == "mine\n"


def test_a_removed_host_leaves_its_name_and_address_to_nobody(hosts: Hosts) -> None:
    a, b = hosts("a", "b")
    network, folder = b.network.inode, b.folder
    b.remove()
    b.remove()
    assert inside(network) == []
    assert not folder.exists()
    assert a.run("getent hosts b", check=False).returncode != 0
    (again,) = hosts("b")
    assert again.address != b.address
    assert a.ssh(again, "hostname").stdout == "b\n"


def test_a_removed_lab_leaves_nothing() -> None:
    if reason := why_not():
        pytest.skip(reason)
    mounts_before, links_before = mounts(), links()
    descriptors = len(os.listdir("/proc/self/fd"))
    with Lab() as lab:
        a, b = lab.make(["a", "b"])
        a.ssh(b, "nohup setsid sleep 543 > /dev/null 2>&1 &")
        a.slow(delay_ms=1)
        b.cut()
        networks = [a.network.inode, b.network.inode, lab.switch.inode]
        assert len(inside(*networks)) > 4
        assert mounts() == mounts_before
        assert links() == links_before
    lab.remove()
    assert inside(*networks) == []
    assert not lab.folder.exists()
    assert (mounts(), links()) == (mounts_before, links_before)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_lab_is_removed_when_the_test_in_it_fails() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with pytest.raises(ZeroDivisionError):
        with Lab() as lab:
            (a,) = lab.make(["a"])
            network = a.network.inode
            raise ZeroDivisionError
    assert inside(network) == []
    assert not lab.folder.exists()


def test_hosts_that_could_not_all_be_made_are_removed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def fails_once(host: Host) -> None:
        started.append(host.name)
        if len(started) == 2:
            raise HostError("no more")

    monkeypatch.setattr(Host, "start", fails_once)
    before = lab.hosts
    with pytest.raises(HostError, match="no more"):
        lab.make(["x", "y"])
    assert started == ["x", "y"]
    assert lab.hosts == before
    assert not (lab.folder / "x").exists()


def test_a_second_lab_does_not_disturb_the_first(hosts: Hosts) -> None:
    a, b = hosts("a", "b")
    with Lab() as second:
        same_name, other = second.make(["a", "other"])
        assert same_name.ssh(other, "hostname").stdout == "other\n"
        assert a.run("getent hosts other", check=False).returncode != 0
        same_name.cut()
        assert reaches(a, b)
        assert (
            same_name.run("ssh-keygen -l -f ~/.ssh/id_ed25519").stdout
            not in a.run("ssh-keygen -l -f ~/.ssh/authorized_keys").stdout
        )
    assert a.ssh(b, "hostname").stdout == "b\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_lab_goes_with_the_process_that_made_it(lab: Lab, number: signal.Signals) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", LIVING_LAB], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
        # A test run in the background ignores Ctrl-C, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with program:
        assert program.stdout is not None
        folder, pid1, _, *networks = program.stdout.readline().split()
        assert os.path.exists(f"/proc/{pid1}")
        program.send_signal(number)
    wait_until("all processes end", lambda: not inside(*map(int, networks)))
    wait_until("files are deleted", lambda: not Path(folder).exists())


def test_what_even_the_janitor_could_not_delete_goes_with_the_next_lab(lab: Lab) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LIVING_LAB], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        folder, _, janitor, *networks = program.stdout.readline().split()
        clear_leftovers()
        assert Path(folder).exists()
        os.kill(int(janitor), signal.SIGKILL)
        program.kill()
    wait_until("all processes end", lambda: not inside(*map(int, networks)))
    with Lab():
        assert not Path(folder).exists()


def test_leftovers_of_a_living_lab_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living, dead, half_made, other = (
        tmp_path / name for name in (f"{PREFIX}a", f"{PREFIX}b", f"{PREFIX}c", "other")
    )
    for folder in (living, dead, half_made, other):
        folder.mkdir()
    for folder in (living, dead, other):
        (folder / "lock").touch()
    with (living / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert clear_leftovers() == [dead]
    assert [path for path in (living, dead, half_made, other) if path.exists()] == [living, half_made, other]


def test_where_a_lab_cannot_be_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        return str(why_not.__wrapped__())

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in reason()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab_module, "NEEDED", {"no-such-command": "some-package"})
    assert "apt-get install some-package" in reason()
    monkeypatch.setattr(lab_module, "NEEDED", {})
    monkeypatch.setattr(lab_module, "NAMESPACES", ["sh", "-c", "echo not permitted >&2; exit 1"])
    assert "not allowed here: not permitted" in reason()


def test_a_person_gets_hosts_and_a_way_in_until_ctrl_c(lab: Lab) -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.hosts", "--hosts", "1", "--shm-mib", "16"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    with program:
        assert program.stdout is not None
        shown = []
        for line in program.stdout:
            shown.append(line)
            if "Ctrl-C" in line:
                break
        text = "".join(shown)
        assert "operator" in text
        assert "n0" in text
        command = text.partition("ssh: ")[2].splitlines()[0].split()
        answer = subprocess.run([*command, "hostname"], capture_output=True, text=True, timeout=30)
        assert answer.stdout == "n0\n", answer.stderr
        program.send_signal(signal.SIGINT)
        assert program.wait(30) == 0
    assert not Path(command[0]).parent.exists()
