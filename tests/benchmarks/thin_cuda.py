"""Zero the machine code that an sm_90 GPU never loads inside CUDA libraries, so that they compress well.

File sizes and layout stay as they are: only the payload of fat-binary entries for other GPU generations is blanked.
An entry is kept where it holds sm_90 code, or, in a group without any, the newest PTX that sm_90 can compile from.
"""

import argparse
import struct
from pathlib import Path

FATBIN_MAGIC = 0xBA55ED50
PTX, ELF = 1, 2


def thin(path: Path, arch: int, keep_ptx: bool) -> tuple[int, int]:
    """Blank unused entries of one library in place; return (bytes kept, bytes blanked)."""
    data = bytearray(path.read_bytes())
    magic = struct.pack("<I", FATBIN_MAGIC)
    kept = blanked = 0
    at = data.find(magic)
    while at >= 0:
        _, version, header_size, size = struct.unpack_from("<IHHQ", data, at)
        if version != 1 or header_size != 16 or at + 16 + size > len(data):
            at = data.find(magic, at + 4)
            continue
        entries, pos, end = [], at + 16, at + 16 + size
        while pos + 64 <= end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, pos)
            (entry_arch,) = struct.unpack_from("<I", data, pos + 28)
            if kind not in (PTX, ELF) or not 64 <= entry_header <= 512:
                break
            entries.append((kind, entry_arch, pos + entry_header, entry_size))
            pos += entry_header + entry_size
        has_code = any(kind == ELF and a == arch for kind, a, _, _ in entries)
        newest_ptx = max((a for kind, a, _, _ in entries if kind == PTX and a <= arch), default=None)
        for kind, entry_arch, start, entry_size in entries:
            wanted = (kind == ELF and entry_arch == arch) or (
                keep_ptx and not has_code and kind == PTX and entry_arch == newest_ptx
            )
            if wanted:
                kept += entry_size
            else:
                data[start : start + entry_size] = bytes(entry_size)
                blanked += entry_size
        at = data.find(magic, end)
    path.write_bytes(data)
    return kept, blanked


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--no-ptx", action="store_true", help="blank PTX too: kernels without sm_90 code are lost")
    args = parser.parse_args()
    for library in args.libraries:
        kept, blanked = thin(library, args.arch, keep_ptx=not args.no_ptx)
        print(f"{library}: kept {kept >> 20} MiB, blanked {blanked >> 20} MiB")
