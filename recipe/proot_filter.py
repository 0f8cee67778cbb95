"""`python proot_filter.py COMMAND...`: run a command with the system calls that old proot releases do not translate
answered by ENOSYS, so that programs fall back to those it does.

proot 5.1.0 (Debian 12) predates statx, openat2 and others: they would reach the machine's files instead of the
sandbox's. x86-64 only, as the agent's binary is; elsewhere the command runs unfiltered. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

# renameat2, execveat, statx, io_uring_setup, openat2, faccessat2, fchmodat2
UNTRANSLATED = (316, 322, 332, 425, 437, 439, 452)
AUDIT_ARCH_X86_64 = 0xC000003E
ENOSYS = 38
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


def program() -> bytes:
    """The BPF program: struct sock_filter {u16 code; u8 jump_true, jump_false; u32 k}, eight bytes each."""
    n = len(UNTRANSLATED)
    steps = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 0, n + 1, AUDIT_ARCH_X86_64), (LOAD, 0, 0, 0)]  # seccomp_data.arch, .nr
    steps += [(JUMP_IF_EQUAL, n - i, 0, number) for i, number in enumerate(UNTRANSLATED)]
    steps += [(RETURN, 0, 0, RET_ALLOW), (RETURN, 0, 0, RET_ERRNO | ENOSYS)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def install() -> None:
    """Filter this process and all it starts. Raises OSError when the kernel refuses."""
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("HP", len(code) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header)):
        if libc.prctl(*arguments, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refuses the system call filter that proot needs")


if __name__ == "__main__":
    if platform.machine() == "x86_64":
        install()
    os.execvp(sys.argv[1], sys.argv[1:])
