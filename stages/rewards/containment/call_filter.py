"""The seccomp filter of the system calls that a contained program may make.

The filter refuses what the namespaces leave open (sockets, memory that is in no process, CPU time
that is in no account, tracing a process of the same user) and the parts of the kernel that past
escapes used.
"""

from __future__ import annotations

import errno
import os
import struct

# (x86_64, aarch64); None: that architecture has no such call.
# fmt: off
_REFUSED: dict[str, tuple[int, int | None]] = {
    "socket": (41, 198),
    # Other processes, other namespaces and mounts, users' keys.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "sethostname": (170, 161),
    "setdomainname": (171, 162), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218),
    # Parts of the kernel that escapes used.
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_setup": (206, 0), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "inotify_init1": (294, 26), "inotify_init": (253, None), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    # Memory that no process is charged with.
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180),
    # The administration of the machine.
    "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "settimeofday": (164, 170), "adjtimex": (159, 171),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "vhangup": (153, 58),
}
# fmt: on
# From 424 on a call has one number on all architectures; unknown numbers may be future calls. They
# get ENOSYS, on which libraries fall back: glibc from clone3, whose flags no filter can read, to
# clone.
_FIRST_COMMON = 424
_ALLOWED_COMMON = (436, 437, 439, 441, 449)  # close_range, openat2, faccessat2, epoll_pwait2, ...
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _SOCKETPAIR, _PRLIMIT = (56, 220), (53, 199), (302, 261)
_MMAP, _SIGACTION = (9, 222), (13, 134)
_NEW_NAMESPACES = 0x7E020000
_UNIX = 1
_SHARED_ANONYMOUS = 0x01 | 0x20
_CHILD_HAS_ENDED = 17

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_CALL_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_SECOND_ARGUMENT, _FOURTH_ARGUMENT, _UPPER_HALF = 24, 40, 4
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE = 0x00050000  # | errno


def instructions() -> bytes:
    """Return the filter for this machine, in classic BPF."""
    column, architecture = ARCHITECTURES[os.uname().machine]
    no = _RETURN, 0, 0, _REFUSE | errno.EPERM
    yes = _RETURN, 0, 0, _ALLOW
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # 32-bit calls, which have other numbers
        (_LOAD, 0, 0, _CALL_NUMBER),
    ]
    # On x86_64 the numbers of the x32 calls start at 2^30, so they end here too.
    common = [(_EQUAL, len(_ALLOWED_COMMON) - i, 0, n) for i, n in enumerate(_ALLOWED_COMMON)]
    common += [(_RETURN, 0, 0, _REFUSE | errno.ENOSYS), yes]
    code += [(_AT_LEAST, 0, len(common), _FIRST_COMMON), *common]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            code += [(_EQUAL, 0, 1, number), no]
    argument = _LOAD, 0, 0, _FIRST_ARGUMENT  # its lower half; both architectures are little-endian
    code += [(_EQUAL, 0, 4, _CLONE[column]), argument, (_ANY_BIT, 0, 1, _NEW_NAMESPACES), no, yes]
    # A socket pair is a pipe (asyncio wakes its loop with one); prlimit only of the caller.
    code += [(_EQUAL, 0, 4, _SOCKETPAIR[column]), argument, (_EQUAL, 1, 0, _UNIX), no, yes]
    code += [(_EQUAL, 0, 4, _PRLIMIT[column]), argument, (_EQUAL, 1, 0, 0), no, yes]
    # Shared anonymous memory that a process hands back with MADV_DONTNEED stays in memory, and is
    # in no process's account.
    flags = _LOAD, 0, 0, _FOURTH_ARGUMENT
    both = [(_AND, 0, 0, _SHARED_ANONYMOUS), (_EQUAL, 0, 1, _SHARED_ANONYMOUS)]
    code += [(_EQUAL, 0, 5, _MMAP[column]), flags, *both, no, yes]
    # Where SIGCHLD is ignored, or SA_NOCLDWAIT set, the CPU time of children is lost when they end.
    # A filter cannot read the action, so setting any is refused; a null pointer only reads it.
    action, upper = [(_LOAD, 0, 0, _SECOND_ARGUMENT + half) for half in (0, _UPPER_HALF)]
    code += [(_EQUAL, 0, 8, _SIGACTION[column]), argument, (_EQUAL, 0, 5, _CHILD_HAS_ENDED)]
    code += [action, (_EQUAL, 0, 2, 0), upper, (_EQUAL, 1, 0, 0), no, yes]
    code.append(yes)
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
