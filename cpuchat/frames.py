"""Frames of the protocol: a 4-byte little-endian length followed by msgpack of one message."""

from __future__ import annotations

import struct

import msgspec

from cpuchat.protocol import AnyCommand, AnyEvent, Command, Event

MAX_FRAME = 64 << 20
_HEADER = struct.Struct("<I")
HEADER_SIZE = _HEADER.size

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(AnyCommand)
_events = msgspec.msgpack.Decoder(AnyEvent)


def encode(message: Command | Event) -> bytes:
    """Return one frame."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


def frame_length(header: bytes | bytearray) -> int:
    """Return the number of bytes that follow a frame's header.

    Raises:
        ValueError: the length is above `MAX_FRAME` (the stream is not ours or out of step).
    """
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME:
        raise ValueError(f"frame of {length} bytes")
    return length


def decode_command(body: bytes) -> AnyCommand:
    """Decode a frame. Raises msgspec.DecodeError or msgspec.ValidationError on anything else."""
    return _commands.decode(body)


def decode_event(body: bytes | memoryview) -> AnyEvent:
    """Decode a frame. Raises msgspec.DecodeError or msgspec.ValidationError on anything else."""
    return _events.decode(body)
