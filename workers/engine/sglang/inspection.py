"""Information that an engine returns about itself: its arguments, and traces of its profiler."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import ProfileReq, ProfileReqOutput, ProfileReqType

from sglrl.errors import InvalidRequest

from . import compat, convert


def server_info(scheduler: Any) -> dict[str, Any]:
    """Return SGLang's arguments with their final values, and the limits of the scheduler.

    A value that msgspec cannot convert to builtin types becomes its ``repr``.
    """
    args = scheduler.server_args
    if hasattr(args, "resolved_dict"):
        info = args.resolved_dict()
    else:
        info = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    info |= scheduler.get_init_info() | {"version": compat.VERSION}
    plain: dict[str, Any] = msgspec.to_builtins(info, enc_hook=repr, str_keys=True)
    return plain


class Profiling:
    """Controls SGLang's profiler, which writes one trace at a time."""

    def __init__(self) -> None:
        self._folder = ""
        """The folder of the running profile, or ""."""
        self._name = f"worker-pid-{os.getpid()}"

    def start(
        self,
        id_: int,
        folder: str,
        activities: tuple[str, ...],
        with_stack: bool,
        record_shapes: bool,
    ) -> ProfileReq:
        """Return SGLang's request to start the profiler.

        Raises:
            InvalidRequest: the profiler is running, or the folder cannot be written.
        """
        if self._folder:
            raise InvalidRequest("the profiler is running: call stop_profile first")
        # SGLang would create the folder only at the end, and an error would end its scheduler.
        try:
            os.makedirs(folder, exist_ok=True)
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"the folder cannot be made: {error}") from None
        if not os.access(folder, os.W_OK):
            raise InvalidRequest(f"{folder} cannot be written")
        self._folder = folder
        return ProfileReq(
            rid=convert.request_id(id_),
            req_type=ProfileReqType.START_PROFILE,
            output_dir=folder,
            activities=list(activities),
            with_stack=with_stack,
            record_shapes=record_shapes,
            profile_id=self._name,
        )

    def stop(self, id_: int) -> ProfileReq:
        """Return SGLang's request to stop the profiler and to write the trace.

        Raises:
            InvalidRequest: the profiler is not running.
        """
        if not self._folder:
            raise InvalidRequest("the profiler is not running: call start_profile first")
        return ProfileReq(rid=convert.request_id(id_), req_type=ProfileReqType.STOP_PROFILE)

    def answered(self, request: ProfileReq, output: ProfileReqOutput) -> list[str]:
        """Return the trace files after a stop, or [] after a start.

        Raises:
            InvalidRequest: SGLang's profiler did not start or stop.
        """
        starts = request.req_type == ProfileReqType.START_PROFILE
        folder = self._folder
        if not starts or not output.success:
            self._folder = ""
        if not output.success:
            raise InvalidRequest(output.message)
        return [] if starts else sorted(map(str, Path(folder).glob(f"{self._name}*")))
