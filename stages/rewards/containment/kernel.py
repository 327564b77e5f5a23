"""The system calls that Python lacks, or whose errors name no call; each raises one that does."""

from __future__ import annotations

import ctypes
import os
import struct

NEW_MOUNTS, NEW_CGROUP, NEW_HOST_NAME, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USERS, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
NO_SETUID, NO_DEVICES, NO_EXECUTION = 0x2, 0x4, 0x8
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000

KILL = 9
_INTERRUPT = 2
_DETACH = 2
_READ_ONLY_ATTRIBUTE, _NO_SETUID_ATTRIBUTE = 0x1, 0x2
_HERE, _WHOLE_TREE = -100, 0x8000
_MOUNT_SETATTR = ctypes.c_long(442)  # one number on every architecture
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SET_PARENT_DEATH_SIGNAL, _SET_SECCOMP, _DROP_BOUNDING, _SET_NO_NEW_PRIVILEGES = 1, 22, 24, 38
_FILTER_MODE = 2
_LAST_CAPABILITY = 63
_CAPABILITIES_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(namespaces: int) -> None:
    """Leave the namespaces given (NEW_*) for fresh ones."""
    _call("unshare", ctypes.c_int(namespaces))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount `source` of file system `kind` at `target`, or bind it there."""
    words = source.encode(), target.encode(), kind.encode() or None
    try:
        _call("mount", *words, ctypes.c_ulong(flags), options.encode() or None)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({source} at {target})") from error


def unmount(target: str) -> None:
    """Detach the mount and all below it."""
    _call("umount2", target.encode(), ctypes.c_int(_DETACH))


def make_read_only(target: str) -> None:
    """Turn the mount at `target` and all below it read-only, with no set-user-id programs."""
    attributes = struct.pack("QQQQ", _READ_ONLY_ATTRIBUTE | _NO_SETUID_ATTRIBUTE, 0, 0, 0)
    here, tree = ctypes.c_int(_HERE), ctypes.c_uint(_WHOLE_TREE)
    size = ctypes.c_size_t(len(attributes))
    _call("syscall", _MOUNT_SETATTR, here, target.encode(), tree, attributes, size)


def pivot_root(new_root: str, old_root: str) -> None:
    """Make `new_root` the root; the old root is then at `old_root`, a directory in it."""
    number = ctypes.c_long(_PIVOT_ROOT[os.uname().machine])
    _call("syscall", number, new_root.encode(), old_root.encode())


def die_with_parent() -> None:
    """Be killed when the parent ends, however it ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, KILL)


def handle_no_interrupt() -> None:
    """Restore the default action of SIGINT, for which Python installs a handler."""
    _libc.signal(_INTERRUPT, None)


def forbid_new_rights() -> None:
    """Prevent programs started later from gaining rights: as set-user-id, or by a capability."""
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            _prctl(_DROP_BOUNDING, capability)
        except OSError:  # the first that this kernel does not know
            break


def drop_capabilities() -> None:
    """Give up every capability."""
    _call("capset", struct.pack("Ii", _CAPABILITIES_VERSION, 0), bytes(24))


def install_filter(instructions: bytes) -> None:
    """Install a seccomp filter (8 bytes an instruction) on this process and all it starts."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    header = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    _call("prctl", ctypes.c_int(_SET_SECCOMP), ctypes.c_ulong(_FILTER_MODE), header)


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _call("prctl", ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
