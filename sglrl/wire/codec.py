"""Convert messages to frames and back, and typed arguments of endpoints to msgpack and back.

Encoders and decoders are built once. There are two layers. The decoders of whole messages
(``ToWorker``, ``ToDriver``) never handle user types. The schema of a call's body comes from the
annotations of the call's endpoint.

numpy arrays anywhere in an argument or result, and ``bytes`` as a whole argument or result, are not
part of the msgpack body. They are sent as raw frames: encoding does not copy them, and decoding
returns a read-only view. The body contains an extension type in place of an array, so an array is
decoded as an array even without an annotation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, Final, Protocol, TypeVar, get_args, get_origin

import msgspec
import msgspec.inspect
import numpy as np

from ..errors import ProtocolError, UsageError
from .calls import CallMessage, Heartbeat, Item, Submit, ToDriver, ToWorker
from .nodes import FromNode, OfConnection, ToNode
from .remote import FromClient, ToClient
from .weights import FromRank, ToRank

Buffer = bytes | bytearray | memoryview

encoder: Final = msgspec.msgpack.Encoder()
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bytes that are not the expected message. Two of them are built-in
errors, for text that is not UTF-8 and for too deep nesting."""

_TRUNCATED: Final = "Input data was truncated"
_SENDABLE: Final = (
    "endpoints take and return what msgspec encodes (numbers, str, bytes, containers, dataclasses, "
    "Structs) and numpy arrays"
)
_ARRAY: Final = 1
"""Code of the msgpack extension that represents an array: ``[raw frame, dtype, shape]``."""
_array_header: Final = msgspec.msgpack.Decoder(tuple[int, str, tuple[int, ...]])


encode: Final[Callable[[Any], bytes]] = encoder.encode
"""Encodes a message or an engine body as msgpack."""


def readable(text: object) -> str:
    """Return ``str(text)``. Replace lone surrogates, which UTF-8 cannot encode.

    If ``str`` raises, return a text that names the error.
    """
    try:
        readable_text = str(text)
    except Exception as error:
        readable_text = f"(it has no text: {type(error).__name__})"
    return readable_text.encode(errors="replace").decode()


def malformed(error: Exception, data: Buffer | str) -> str:
    """Return a description of what is wrong with malformed JSON or msgpack.

    Args:
        error: the error that msgspec raised for ``data``.
        data: the malformed JSON or msgpack.
    """
    text = str(error)
    if text != _TRUNCATED:
        return text
    size = len(data)
    blank = not (data if isinstance(data, str) else bytes(data)).strip()
    return "it is empty" if blank else f"it ends in the middle, after {size:,} bytes"


def _decoder(type_: Any, what: str) -> Callable[[Buffer], Any]:
    """Return a function that decodes a frame.

    The function raises ``ProtocolError`` if the frame is not a message of this type.
    """
    decode = msgspec.msgpack.Decoder(type_).decode

    def checked(frame: Buffer) -> Any:
        try:
            return decode(frame)
        except MALFORMED as error:
            raise ProtocolError(f"not a message {what}: {error}") from None

    return checked


decode_to_worker: Final[Callable[[Buffer], ToWorker]] = _decoder(ToWorker, "for a worker")
decode_to_driver: Final[Callable[[Buffer], ToDriver]] = _decoder(ToDriver, "for a driver")
decode_heartbeat: Final[Callable[[Buffer], Heartbeat]] = _decoder(
    Heartbeat, "from a worker's heartbeat"
)
# These decode the messages of the weight channel.
decode_to_rank: Final[Callable[[Buffer], ToRank]] = _decoder(ToRank, "for a rank")
decode_from_rank: Final[Callable[[Buffer], FromRank]] = _decoder(FromRank, "from a rank")
# These decode the messages between the driver and a client in another process.
decode_to_client: Final[Callable[[Buffer], ToClient]] = _decoder(ToClient, "for a client")
decode_from_client: Final[Callable[[Buffer], FromClient]] = _decoder(FromClient, "from a client")
# The first function decodes the messages of a node's connection, the other two of its session.
decode_of_connection: Final[Callable[[Buffer], OfConnection]] = _decoder(
    OfConnection, "between a driver and a node"
)
decode_to_node: Final[Callable[[Buffer], ToNode]] = _decoder(ToNode, "for a node")
decode_from_node: Final[Callable[[Buffer], FromNode]] = _decoder(FromNode, "from a node")


_Frame = TypeVar("_Frame", bound=Buffer)


def split_frames(
    parts: Sequence[CallMessage] | Sequence[Item], frames: list[_Frame]
) -> list[list[_Frame]]:
    """Return the raw frames of each part. Raw frames follow the first frame of a message.

    Raises:
        ProtocolError: the number of raw frames differs from the number in the parts, or a part has
            an impossible number.
    """
    at = 1
    owned = []
    for part in parts:
        count = part.frames
        if not 0 <= count <= len(frames) - at:
            raise ProtocolError(f"a part of {count} raw frames in a message of {len(frames) - 1}")
        owned.append(frames[at : at + count])
        at += count
    if at != len(frames):
        raise ProtocolError(f"{len(frames) - at} raw frames belong to nothing")
    return owned


class OutgoingCall(Protocol):
    """The part of a ``core.calls.Call`` that is encoded when the call is sent."""

    id: int
    endpoint: str
    args: msgspec.Struct | msgspec.Raw
    frames: Sequence[Any]
    trace: Mapping[str, str] | None


def encode_submit(calls: Sequence[OutgoingCall]) -> list[Any]:
    """Encode a ``Submit`` message with these calls, and return its frames.

    Raises:
        Exception: the arguments of a call cannot be encoded.
    """
    # These tuples have the layout of ``CallMessage``, so that the arguments are encoded in place.
    messages: list[Any] = []
    frames: list[Any] = [b""]
    for call in calls:
        messages.append((call.id, call.endpoint, call.args, len(call.frames), call.trace))
        frames.extend(call.frames)
    frames[0] = encode(Submit(messages))
    return frames


class Blob:
    """Bytes in a body that are sent as a raw frame."""

    __slots__ = ("data",)

    def __init__(self, data: Buffer) -> None:
        self.data = data


def _flat(data: Buffer) -> Buffer:
    """Return the same bytes as one contiguous buffer whose ``len`` is its size in bytes.

    ZeroMQ accepts no other buffers.
    """
    if isinstance(data, memoryview):
        try:
            return data.cast("B")
        except (TypeError, ValueError):
            # The view is not contiguous, or has an item format that Python does not support.
            return data.tobytes()
    return data


class Body:
    """Encodes and decodes values of one type, with their raw frames.

    Several threads must not use it at the same time.
    """

    def __init__(self, type_: Any) -> None:
        self._frames: list[Buffer] = []
        self._incoming: Sequence[Buffer] = ()
        self._type = type_
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._enc_hook)
        self._decoder = msgspec.msgpack.Decoder(
            type_, dec_hook=self._dec_hook, ext_hook=self._ext_hook
        )

    def encode(self, value: Any) -> tuple[bytes, list[Buffer]]:
        """Encode a value. Return ``(msgpack, raw frames)``.

        Raises:
            TypeError: the value contains an object that has no encoding.
            ValueError: the value nests too deeply, or contains text that is not Unicode.
            OverflowError: the value contains an integer of more than 64 bits.
        """
        frames: list[Buffer] = []
        self._frames = frames
        try:
            return self._encoder.encode(value), frames
        except RecursionError:
            raise ValueError("it contains itself, or nests too deeply to be sent") from None

    def decode(self, body: Buffer, frames: Sequence[Buffer] = ()) -> Any:
        """Decode a value.

        Raises:
            msgspec.ValidationError: the body is not a value of the type.
        """
        self._incoming = frames
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            if isinstance(error, msgspec.ValidationError):
                raise
            raise msgspec.ValidationError(str(error)) from None
        except (ValueError, RecursionError) as error:
            raise msgspec.ValidationError(str(error)) from None
        except Exception as error:
            # A type's __post_init__ raised this. msgspec converts only ValueError and TypeError.
            raise msgspec.ValidationError(f"{type(error).__name__}: {error}") from error
        finally:
            self._incoming = ()

    def _enc_hook(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise TypeError("numpy arrays of Python objects cannot be sent")
            if np.dtype(value.dtype.str) != value.dtype:
                raise TypeError(
                    f"numpy arrays of dtype {value.dtype} cannot be sent; view them as a plain "
                    "dtype of the same size"
                )
            array = np.ascontiguousarray(value)
            self._frames.append(array.reshape(-1).view(np.uint8).data)
            header = encoder.encode((len(self._frames) - 1, array.dtype.str, value.shape))
            return msgspec.msgpack.Ext(_ARRAY, header)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Blob):
            self._frames.append(value.data)
            return len(self._frames) - 1
        raise TypeError(
            f"{type(value).__module__}.{type(value).__qualname__} cannot be sent; {_SENDABLE}"
        )

    def _dec_hook(self, type_: Any, value: Any) -> Any:
        origin = get_origin(type_) or type_
        if origin is np.ndarray:
            if not isinstance(value, np.ndarray):
                raise ValueError(f"expected a numpy array, got {type(value).__name__}")
            _check_array(value, type_)
            return value
        if origin is Blob:
            return Blob(self._frame(msgspec.convert(value, int)))
        raise NotImplementedError(f"type {type_} is not supported")

    def _ext_hook(self, code: int, data: memoryview) -> Any:
        if code != _ARRAY:
            raise ValueError(f"unknown extension type {code}")
        index, dtype, shape = _array_header.decode(data)
        if any(n < 0 for n in shape):
            raise ValueError(f"{shape} is not the shape of an array")
        try:
            return np.frombuffer(self._frame(index), dtype=np.dtype(dtype)).reshape(shape)
        except (TypeError, ValueError, OverflowError, SyntaxError) as error:
            # numpy parses some dtype strings as Python, which may raise SyntaxError.
            raise ValueError(f"not an array ({dtype!r}, {shape}): {error}") from None

    def _frame(self, index: int) -> Buffer:
        if not 0 <= index < len(self._incoming):
            raise ValueError(f"raw frame {index} is missing")
        return self._incoming[index]


def check_type(type_: Any, what: str) -> None:
    """Raise ``UsageError`` if values of the type, or values in them, cannot be sent.

    Args:
        type_: the type to check.
        what: the description of the argument or result of this type, for the error.
    """
    infos = [msgspec.inspect.type_info(type_)]
    known = {id(infos[0])}
    # The list grows while it is read. A type may contain itself, so each is added once.
    for info in infos:
        if isinstance(info, msgspec.inspect.CustomType):
            cls = get_origin(info.cls) or info.cls
            if cls not in (np.ndarray, Blob):
                raise UsageError(
                    f"{what} has the type {cls.__module__}.{cls.__qualname__}, which cannot be "
                    f"sent; {_SENDABLE}"
                )
        for part in _parts(info):
            if id(part) not in known:
                known.add(id(part))
                infos.append(part)


def _parts(info: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """Return the types of a type's fields, items, keys and values, without the types in them."""
    parts = []
    for name in info.__struct_fields__:
        value = getattr(info, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, msgspec.inspect.Field):
                part = part.type
            if isinstance(part, msgspec.inspect.Type):
                parts.append(part)
    return parts


def _check_array(array: np.ndarray[Any, Any], type_: Any) -> None:
    """Raise ``ValueError`` if an array lacks the dtype of its annotation ``NDArray[...]``."""
    args = get_args(type_)
    if len(args) != 2 or not get_args(args[1]):
        return
    (wanted,) = get_args(args[1])
    if isinstance(wanted, type) and not np.issubdtype(array.dtype, wanted):
        raise ValueError(f"expected an array of {wanted.__name__}, got {array.dtype}")


class Arguments:
    """Encodes and decodes the arguments of one function, checked against its annotations."""

    def __init__(self, name: str, signature: Signature, hints: dict[str, Any]) -> None:
        self.name = name
        self.signature = signature
        self._blobs: list[str] = []
        self._variadic: str | None = None
        fields: list[Any] = []
        for parameter in signature.parameters.values():
            if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                raise UsageError(
                    f"{name} takes *{parameter.name}; endpoints name their arguments one by one, "
                    "so that each can be checked and sent"
                )
            hint = hints.get(parameter.name, Any)
            if hint is bytes:
                self._blobs.append(parameter.name)
                hint = Blob
            check_type(hint, f"{name}(): argument {parameter.name!r}")
            fields.append((parameter.name, hint))
        self.struct = msgspec.defstruct(f"{name}_arguments", fields, array_like=True)
        self._body = Body(self.struct)

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, list[Buffer]]:
        """Bind and encode arguments. Check them by decoding them as the worker will do.

        Raises:
            UsageError: the number of arguments, a name or a type is wrong.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{self.name}(): {error}") from None
        bound.apply_defaults()
        values = bound.arguments
        for name in self._blobs:
            value = values[name]
            if isinstance(value, (bytes, bytearray, memoryview)):
                values[name] = Blob(_flat(value))
            else:
                raise UsageError(
                    f"{self.name}(): argument {name!r}: expected bytes, got {type(value).__name__}"
                )
        try:
            body, frames = self._body.encode(list(values.values()))
            self._body.decode(body, frames)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"{self.name}(): {self._explain(str(error))}") from None
        return body, frames

    def decode(self, body: Buffer, frames: Sequence[Buffer]) -> dict[str, Any]:
        """Return the arguments by name.

        Raises:
            msgspec.ValidationError: the arguments do not match the annotations.
        """
        struct = self._body.decode(body, frames)
        values = {name: getattr(struct, name) for name in self.signature.parameters}
        for name in self._blobs:
            values[name] = bytes(values[name].data)
        return values

    def _explain(self, error: str) -> str:
        """Replace the position in an error of msgspec, such as ``$[1]``, by the argument's name."""
        for position, name in enumerate(self.signature.parameters):
            marker = f"$[{position}]"
            if marker in error:
                return error.replace(f" - at `{marker}", f" in argument `{name}")
        return error


class Result:
    """Encodes and decodes the results of one endpoint. ``bytes`` is sent as a raw frame."""

    def __init__(self, hint: Any) -> None:
        self.type = hint
        self._is_blob = hint is bytes
        self._body = Body(Blob if self._is_blob else hint)

    def encode(self, value: Any) -> tuple[bytes, list[Buffer]]:
        """Encode a result. Return ``(msgpack, raw frames)``.

        Raises:
            TypeError: the result contains an object that has no encoding.
        """
        if self._is_blob and isinstance(value, (bytes, bytearray, memoryview)):
            value = Blob(_flat(value))
        return self._body.encode(value)

    def decode(self, body: Buffer, frames: Sequence[Buffer] = ()) -> Any:
        """Decode a result.

        Raises:
            ProtocolError: the result does not have the type that the endpoint declares.
        """
        try:
            value = self._body.decode(body, frames)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(
                f"the endpoint returned something else than it declares: {error}"
            ) from None
        return bytes(value.data) if self._is_blob else value


Decode = Callable[[Buffer, Sequence[Buffer]], Any]
