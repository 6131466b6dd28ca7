"""A process that reads files into shared memory, and what the beginning of a JPEG file says.

Run as a script it serves one `flcuda.data.file_reader.FileReaders`. It starts with nothing but the standard library, in
some milliseconds and megabytes, and knows of no device. So this module imports little, and no other one of flcuda's.

A request on standard input is a length (`LENGTH`) and so many bytes: absolute paths with a zero byte between them. The
answer on standard output has a `FOUND` for each, in pieces where files take long to read: where the file lies in the
memory, its length, and its image's height and width; a length of 0 says that the caller has to read this file itself:
it cannot be read, is no regular file, does not fit, or is no JPEG file that nvImageCodec shows as Pillow does. Files
are read from the memory's beginning, whatever was there before.

The process ends with its standard input, however the caller ended, and only so: it has a process group of its own, as
Ctrl-C and a scheduler's signals to the caller's group are the caller's to answer; such signals are ignored where they
are sent to each process of a job.
"""

import contextlib
import mmap
import os
import re
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator

READY = b"flcuda reader 1\n"
"""What the process says first."""
LENGTH = struct.Struct("=I")
FOUND = struct.Struct("=4I")

# Most photographs take one read; room for a whole large file would be looked at by the system, page by page.
_READ_BYTES = 1 << 20
# A pipe or terminal is neither waited for nor taken over; regular files are read as without these.
_READ_ONLY = os.O_RDONLY
for _word in ("O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY"):
    _READ_ONLY |= getattr(os, _word, 0)
# The caller takes long silence for a fault, and each piece of an answer takes its time.
_PIECE_S = 1.0
_NOT_FOUND = FOUND.pack(0, 0, 0, 0)
# As `ps` and `top` show it; the system takes 15 characters.
_NAME = b"flcuda-reader"
# The last marker of a whole JPEG file is within so many bytes of its end; some programs pad or append a little.
_JPEG_TAIL = 4096
_JPEG_END = b"\xff\xd9"
# How most files of data sets begin: JFIF, tables of quantization, and the frame, of one component or three. To find it
# at once takes half as long as to step from marker to marker, which is done for all other files.
_COMMON_JPEG = re.compile(
    rb"\xff\xd8\xff\xe0\x00\x10JFIF\0.{9}(?:\xff\xdb\x00(?:\x43.{65}|\x84.{130}))*"
    rb"\xff[\xc0-\xc2]\x00[\x0b\x11](?=.{5}[\x01\x03].)",
    re.DOTALL,
)
# Bits a sample, height, width.
_FRAME = struct.Struct(">BHH")
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
# Pillow turns an image by this where EXIF does not say how.
_XMP_TURNED = re.compile(rb'tiff:Orientation(?:="|>)[02-9]')


def jpeg_frame(content: bytes | memoryview) -> tuple[int, int] | None:
    """Reads a JPEG file's header, as far as it must be known before nvImageCodec may have the file.

    libjpeg's rules: JFIF says YCbCr; else Adobe's marker says it, if there is one; else the components' numbers.

    Returns:
        Height and width as stored; None where the file has no end, samples that are not of 8 bits, colours that are not
        YCbCr, or is turned by XMP.
    """
    if content[-2:] != _JPEG_END and _JPEG_END not in bytes(content[max(2, len(content) - _JPEG_TAIL) :]):
        return None
    common = _COMMON_JPEG.match(content)
    place = _frame_place(content) if common is None else common.end()
    if place is None:
        return None
    precision, height, width = _FRAME.unpack_from(content, place)
    return (height, width) if precision == 8 else None


def _frame_place(content: bytes | memoryview) -> int | None:
    """Steps from marker to marker to the frame; None where there is none, or colours are not YCbCr."""
    if content[:3] != b"\xff\xd8\xff":
        return None
    place = 2
    jfif = False
    adobe = None
    last = len(content) - 10
    while place < last:
        if content[place] != 0xFF:
            return None
        marker = content[place + 1]
        if marker == 0xFF:
            place += 1
            continue
        body = place + 4
        end = place + 2 + (content[place + 2] << 8 | content[place + 3])
        if marker == 0xE0:
            jfif = jfif or content[body : body + 5] == b"JFIF\0"
        elif marker == 0xE1:
            if content[body : body + len(_XMP)] == _XMP and _XMP_TURNED.search(content, body, end):
                return None
        elif marker == 0xEE:
            if content[body : body + 5] == b"Adobe" and body + 12 <= min(end, len(content)):
                adobe = content[body + 11]
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            components = content[body + 5]
            if components == 3:
                is_plain = jfif or (content[body + 6 : end : 3] != b"RGB" if adobe is None else adobe == 1)
            else:
                is_plain = components == 1
            return body if is_plain else None
        place = end
    return None


def main(descriptor: int, size: int) -> None:
    """Serves requests until standard input ends.

    Args:
        descriptor: of the memory.
        size: of the memory, in bytes.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        _name_process()
    # Keeps no folder of the caller's in use.
    os.chdir("/")
    memory = memoryview(mmap.mmap(descriptor, size))
    os.close(descriptor)
    # A caller that is no more wants no answer.
    with contextlib.suppress(OSError):
        _write(READY)
        while head := _received(LENGTH.size):
            paths = _received(*LENGTH.unpack(head)).split(b"\0")
            _answer(paths, memory)


def _name_process() -> None:
    file = os.open("/proc/self/comm", os.O_WRONLY)
    try:
        os.write(file, _NAME)
    finally:
        os.close(file)


def _received(size: int) -> bytes:
    """Returns so many bytes of standard input, or none at its end."""
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(content: bytes) -> None:
    while content:
        content = content[os.write(1, content) :]


def _answer(paths: list[bytes], memory: memoryview) -> None:
    """Reads files and writes what is said of them: in one piece, or one a second."""
    said = []
    due = time.monotonic() + _PIECE_S
    for found in _found(paths, memory):
        said.append(found)
        now = time.monotonic()
        if now > due:
            _write(b"".join(said))
            said.clear()
            due = now + _PIECE_S
    _write(b"".join(said))


def _found(paths: list[bytes], memory: memoryview) -> Iterator[bytes]:
    """Reads files, one behind the other; yields what the answer says of each."""
    place = 0
    for path in paths:
        try:
            end = _read(path, memory, place)
        except OSError:
            end = place
        frame = jpeg_frame(memory[place:end]) if end > place else None
        if frame is None:
            yield _NOT_FOUND
        else:
            yield FOUND.pack(place, end - place, *frame)
            place = end


def _read(path: bytes, memory: memoryview, place: int) -> int:
    """Reads a file to a place of the memory; returns its end there, or the place itself where it is not to be read."""
    end = place
    descriptor = os.open(path, _READ_ONLY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return place
        while True:
            room = memory[end : end + _READ_BYTES]
            size = os.readv(descriptor, (room,))
            end += size
            if size < len(room):
                return end
            if end == len(memory):
                return place
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]))
