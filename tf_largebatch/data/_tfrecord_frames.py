"""The frames of TFRecord files.

A file is a row of frames (tensorflow/core/lib/io/record_writer.h), little-endian:

    uint64 length | uint32 masked CRC-32C of the length | data | uint32 masked CRC-32C of the data

with `masked(crc) = (crc >> 15 | crc << 17) + 0xa282ead8` in 32 bits. Only the lengths are needed
to reach any record.
"""

from __future__ import annotations

import struct
from array import array

import google_crc32c
import numpy as np
import numpy.typing as npt

from tf_largebatch.core.errors import DataError
from tf_largebatch.data._record_files import LocalFile, RemoteFile, is_local

HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
FRAME_BYTES = HEADER.size + FOOTER.size  # around the data of each record

# A local read of one page takes as long as one of 12 bytes, and holds many small records. A
# remote one waits tens of ms whatever its size.
_LOCAL_BLOCK_BYTES = 4096
_REMOTE_BLOCK_BYTES = 4 * 2**20


def masked_crc32c(data: bytes) -> int:
    """The checksum of TFRecord files."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record_lengths(
    file: LocalFile | RemoteFile, *, path: str, file_bytes: int
) -> npt.NDArray[np.uint64]:
    """The length of each record's data, by going from one header to the next.

    Raises:
        DataError: the file is compressed, truncated or corrupt, with the byte offset; checksums
            of data are not looked at.
        OSError, tf.errors.OpError: it cannot be read.
    """
    block_bytes = _LOCAL_BLOCK_BYTES if is_local(path) else _REMOTE_BLOCK_BYTES
    lengths = array("Q")
    block, block_offset, offset = b"", 0, 0
    while offset < file_bytes:
        start = offset - block_offset
        if start + HEADER.size > len(block):
            block = file.read_at(offset, min(block_bytes, file_bytes - offset))
            block_offset, start = offset, 0
        header = block[start : start + HEADER.size]
        if len(header) == HEADER.size:
            length, crc = HEADER.unpack(header)
            end = offset + FRAME_BYTES + length
            if crc == masked_crc32c(header[:8]) and end <= file_bytes:
                lengths.append(length)
                offset = end
                continue
        raise _damage(path, header, len(lengths), offset, file_bytes)
    return np.array(lengths, np.uint64)


def _damage(path: str, header: bytes, record: int, offset: int, file_bytes: int) -> DataError:
    """What is wrong with the file, seen from the first header that cannot be followed."""
    compression = _compression(header) if offset == 0 else None
    if compression:
        return DataError(
            f"{path!r} is compressed with {compression}, in which no record can be reached "
            "without unpacking all before it (and JPEG images are compressed as they are). Write "
            f"it again: read it with tf.data.TFRecordDataset(FILE, {compression.upper()!r}), and "
            "write the records with tf.io.TFRecordWriter(NEW_FILE)."
        )
    place = f"record {record} of {path!r}, at byte {offset},"
    if len(header) < HEADER.size:
        return DataError(
            f"The file ends inside {place} of whose header of {HEADER.size} bytes it has "
            f"{len(header)}; was it copied in full?"
        )
    length, crc = HEADER.unpack(header)
    if crc != masked_crc32c(header[:8]):
        return DataError(
            f"The checksum of the length of {place} is wrong; the file is corrupt there, or is no "
            "TFRecord file. Copy it again."
        )
    return DataError(
        f"The file ends inside {place} which takes {FRAME_BYTES + length} bytes, of which the "
        f"file has {file_bytes - offset}; was it copied in full?"
    )


def _compression(header: bytes) -> str | None:
    if header.startswith(b"\x1f\x8b"):
        return "gzip"
    # RFC 1950: deflate with its largest window; the two bytes are a multiple of 31.
    is_zlib = header.startswith(b"\x78") and int.from_bytes(header[:2], "big") % 31 == 0
    return "zlib" if is_zlib else None
